"""The configuration of an evaluation, from that of a run: its prompts, rewards and generators, without the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.evaluation.model_choice import ModelChoice
from rollmesh.learner.model_files.checks import declared_context, read_model_config
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.config.load import parse_overrides, read_values
from rollmesh.mesh.errors import ConfigError

# Sections whose keys all concern the responses to held-out prompts.
_KEPT = ("data", "rollout", "reward", "eval", "network", "security", "resources")
_KEPT_OF = {
    "buffer": ("python", "stall_limit_s", "reconnect_grace_s", "lease_s"),
    "weights": ("bucket_bytes", "fanout"),
    "logging": ("level",),
}


def read_for_evaluation(
    source: Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    given: Mapping[str, Any],
    named: str | None = None,
) -> Config:
    """The configuration that a user means, which needs no training data.

    Args:
        source: a YAML file or the same as a mapping; None: defaults.
        overrides: as on the command line.
        given: values by key, `a.b.c`, of other options; they take precedence.
        named: the model that is asked for; it stands in for a `model.path` that is not set.

    Raises:
        ConfigError: unreadable, unknown keys, no model or no prompts.
    """
    values = read_values(source or {}, {**parse_overrides(overrides), **given})
    data, model = values.get("data") or {}, values.get("model") or {}
    if not isinstance(data, Mapping) or data.get("eval") is None:
        raise ConfigError("no prompts are given", hint="set data.eval to Parquet or JSONL files")
    if named is not None and isinstance(model, Mapping) and not model.get("path"):
        model = {**model, "path": named}
    if not isinstance(model, Mapping) or not model.get("path"):
        raise ConfigError("no model is given", hint="name one with --model, or set model.path")
    # No one reads it.
    return load_config({**values, "model": model, "data": {"train": data["eval"], **data}})


def evaluation_config(config: Config, choice: ModelChoice, out: Path) -> Config:
    """The configuration with which the services of an evaluation run.

    Args:
        config: of the run whose prompts, rewards and generators are used.
        choice: the model.
        out: folder of the evaluation.

    Raises:
        ConfigError: the folder's name cannot be that of a run.
    """
    values = config.model_dump()
    kept = {section: values[section] for section in _KEPT}
    for section, keys in _KEPT_OF.items():
        kept[section] = {key: values[section][key] for key in keys}
    kept["rollout"] |= _default_lengths(config, Path(choice.base.path))
    kept["data"] |= {"train": kept["data"]["eval"], "curriculum": None}
    kept["buffer"]["min_members"] = 1
    # It publishes once, from host memory: all devices are the generators'.
    kept["learner"] = {"device": "cpu", "python": config.learner.python}
    if choice.lora is not None:
        # The evaluator publishes the model with its adapter merged in.
        kept["learner"]["lora"] = choice.lora.model_dump() | {"push": "full"}
    run = {"dir": out.parent, "name": out.name, "seed": config.run.seed}
    return load_config({**kept, "run": run, "model": choice.base.model_dump()})


def _default_lengths(config: Config, folder: Path) -> dict[str, int]:
    """Defaults of lengths that a model with a short context has room for; empty where they stay as they are."""
    rollout, chosen = config.rollout, config.rollout.model_fields_set
    context = declared_context(read_model_config(folder, "model.path")) if folder.is_dir() else None
    if context is None or rollout.context_tokens <= context or "max_prompt_tokens" in chosen:
        return {}
    response = rollout.max_response_tokens
    if "max_response_tokens" not in chosen:
        response = min(response, context // 2)
    return {"max_prompt_tokens": context - response, "max_response_tokens": response} if response < context else {}


WITHOUT_REWARDS: Mapping[str, Any] = {
    "reward.functions": ["none"],
    "reward.by_data_source": {},
    "reward.normalize": {},
    "reward.endpoints": [],
    "reward.in_process": True,
}
"""Values of keys with which responses are not judged."""
