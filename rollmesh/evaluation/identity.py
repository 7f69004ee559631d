"""The identity of an evaluation: its model and all that its values depend on, so that a rerun continues it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollmesh.evaluation.model_choice import ModelChoice
from rollmesh.learner.evaluation.measurement_identity import measurement
from rollmesh.learner.recovery.run_identity import fingerprint, model_files
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.files import write_atomically

IDENTITY = "measurement.json"
# Changes of these ask further prompts, or judge the same responses otherwise.
_FREE = frozenset({"eval.rows", "eval.right_at"})


def identity_of(
    config: Config, choice: ModelChoice, *, with_log_probs: bool, rewards: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Model, data and measurement by name, with files by their content.

    Args:
        config: of the evaluation; the model's path is a local folder.
        choice: the model.
        with_log_probs: token ids and log-probs are stored too.
        rewards: see `EvaluationRequest`.
    """
    return {
        "name": choice.name,
        "data": config.data.held_out,
        "model": {
            "base": fingerprint(model_files(Path(config.model.path))),
            "weights": fingerprint(_weight_files(choice.weights)) if choice.weights is not None else "",
            "dtype": config.model.dtype,
        },
        "with_log_probs": with_log_probs,
        "measurement": {**measurement(config), **rewards},
    }


def claim_folder(folder: Path, identity: dict[str, Any]) -> None:
    """Writes the identity into a new folder, or refuses a folder of another evaluation.

    Raises:
        ConfigError: it is of another one; names what differs.
        DataError: the folder cannot be used.
    """
    path = folder / IDENTITY
    before = read_identity(folder) if path.exists() else None
    if before is not None and (changed := changes(before, identity)):
        raise ConfigError(
            f"{folder} holds another evaluation, which differs in {', '.join(changed)}",
            hint="choose another --out, or start this one over with --fresh",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(identity, indent=1, default=str) + "\n")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}", hint="choose another --out") from error


def read_identity(folder: Path) -> dict[str, Any]:
    """The identity in a folder.

    Raises:
        DataError: it has none, or one that cannot be read.
    """
    path = folder / IDENTITY
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{folder} is not the folder of an evaluation: {error}", hint="give one that has ended"
        ) from None


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of what differs between two identities, free changes aside."""
    now = json.loads(json.dumps(now, default=str))
    one, two = before["measurement"], now["measurement"]
    found = [f"model ({key})" for key in now["model"] if before["model"].get(key) != now["model"][key]]
    found += [key for key in {**one, **two} if key not in _FREE and one.get(key) != two.get(key)]
    return found + (["--log-probs"] if before["with_log_probs"] != now["with_log_probs"] else [])


def _weight_files(weights: Path) -> list[Path]:
    """Files that identify stored weights: of a checkpoint its state and the digests of all others."""
    return sorted(path for path in weights.iterdir() if path.suffix in (".json", ".safetensors"))
