"""The identity of a training: a run continues with the same, so that its data come in the same order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import xxhash

from rollmesh.learner.recovery.run_identity import fingerprint, model_files, rows_content
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.learner import EngineSection
from rollmesh.mesh.config.lora import adapter_form
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import ConfigError

KEY = "trainer"
"""Its name in a checkpoint's state."""
COMMAND = "command"
"""File of a run folder with the command that trains there: `sft`, `rm` or `dpo`."""
_ADAPTER = "learner.lora"


def identity_of(command: str, config: TrainerConfig) -> dict[str, str]:
    """The identity of a training, by key of the configuration.

    Args:
        command: `sft`, `rm` or `dpo`.
        config: of the run; the model's path is a local folder.
    """
    data = config.data.model_dump(mode="json", exclude={"train", "eval", "epochs"})
    return {
        "command": command,
        "model.path": fingerprint(model_files(Path(config.model.path))),
        "data.train": rows_content(config.data.train, config.data.curriculum) + _templates(config.data.train),
        "run.seed": str(config.run.seed),
        "learner.batch.rows": str(config.learner.batch.rows),
        **{f"data.{name}": str(value) for name, value in data.items()},
        **adapter_form(config.learner.lora),
    }


def prepared_identity(
    identity: Mapping[str, str], learner: EngineSection, device: Literal["cpu", "cuda"]
) -> dict[str, str]:
    """The identity of what the model computes before the first step, when no adapter takes part.

    Args:
        identity: of the training.
        learner: computes it.
        device: on which it does.
    """
    return {
        **{key: value for key, value in identity.items() if not key.startswith(_ADAPTER)},
        "learner.engine": learner.engine,
        "learner.param_dtype": learner.compute_on(device)[0],
        "learner.float32_logits": str(learner.float32_logits),
        "learner.attention": learner.attention,
        "learner.router": learner.router.model_dump_json(),
    }


def held_out_identity(prepared: Mapping[str, str], config: TrainerConfig) -> dict[str, str]:
    """The same of the held-out rows; `prepared` is that of the rows to train on."""
    sources = config.data.eval or ()
    return {**prepared, "data.eval": rows_content(sources) + _templates(sources), "eval.rows": str(config.eval.rows)}


def measured_by(config: TrainerConfig) -> str:
    """A name of the way in which a training is evaluated: values under another name cannot be compared."""
    loss = getattr(config, "loss", None)
    sources = config.data.eval or ()
    return digest_of(
        {
            "data.eval": rows_content(sources) + _templates(sources),
            "eval.rows": str(config.eval.rows),
            "loss": "" if loss is None else loss.model_dump_json(),
            **{name: str(getattr(config.data, name)) for name in ("prompt_key", "max_tokens", "on_long")},
        }
    )


def digest_of(identity: Mapping[str, str]) -> str:
    """A short name of an identity, for files that are good for it alone."""
    return xxhash.xxh3_64_hexdigest(json.dumps(identity, sort_keys=True).encode())


def check_identity(folder: Path, before: object, now: Mapping[str, str]) -> None:
    """Refuses to continue a run as another one.

    Args:
        folder: of the run.
        before: what its checkpoint says under `KEY`.
        now: what it would be.

    Raises:
        ConfigError: names what differs.
    """
    known = before if isinstance(before, Mapping) else {}
    if changed := [key for key, value in now.items() if known.get(key) != value]:
        # A section that is new says enough.
        named = [key for key in changed if key.rpartition(".")[0] not in changed]
        raise ConfigError(
            f"run {folder} was begun with something else: {', '.join(named)}",
            hint="choose a --run.name of its own, or start over with --fresh",
        )


def _templates(sources: Sequence[DataSource]) -> str:
    """Settings of sources that change the tokens of their rows; empty where none has any."""
    given = [source.chat_template_kwargs for source in sources]
    return json.dumps(given, sort_keys=True) if any(given) else ""
