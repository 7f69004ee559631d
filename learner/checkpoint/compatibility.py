"""Compatibility of checkpoints and algorithms: checked before a start, on the files, and when one is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.learner.checkpoint.names import STATE_NAME, checkpoint_name, newest_version
from rollmesh.mesh.errors import DataError

if TYPE_CHECKING:
    from rollmesh.learner.algorithms.interface import Algorithm

_HINT = "resume with the algorithm that wrote it, or start a run under another name"


def check_newest(root: Path, algorithm: Algorithm) -> None:
    """Refuses an algorithm that cannot continue from the newest checkpoint of a run.

    Args:
        root: folder of the checkpoints; may be absent.
        algorithm: of the run.

    Raises:
        DataError: naming the difference. A damaged checkpoint is named where it is loaded.
    """
    if (version := newest_version(root)) is None:
        return
    folder = root / checkpoint_name(version)
    check_roles(folder, (role.name for role in algorithm.needs.roles if role.trained))
    try:
        extra = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))["extra"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    algorithm_state(folder, extra, algorithm)


def check_roles(folder: Path, roles: Iterable[str]) -> None:
    """Refuses a checkpoint without the state of a trained role.

    Args:
        folder: of the checkpoint.
        roles: that are trained next to the actor.

    Raises:
        DataError: names them.
    """
    if missing := [role for role in roles if not (folder / role).is_dir()]:
        raise DataError(f"checkpoint {folder} holds no state of {', '.join(missing)}", hint=_HINT)


def algorithm_name(algorithm: Algorithm) -> str:
    """The name under which an algorithm's state is stored."""
    return type(algorithm).__qualname__


def algorithm_state(folder: Path, extra: Mapping[str, Any], algorithm: Algorithm) -> Any:
    """The algorithm's own state.

    Args:
        folder: of the checkpoint.
        extra: the data stored with the weights.
        algorithm: to restore.

    Raises:
        DataError: it is another algorithm's.
    """
    stored, name = extra.get("algorithm"), algorithm_name(algorithm)
    found = stored.get("name") if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or found != name:
        raise DataError(f"checkpoint {folder} holds the state of the algorithm {found}, not of {name}", hint=_HINT)
    return stored["state"]
