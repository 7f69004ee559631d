"""Compatibility of checkpoints with algorithm and optimizers: checked before a start, on the files, and at a load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.learner.checkpoint.names import checkpoint_name, newest_version
from rollmesh.learner.engines.interface import STATE_NAME
from rollmesh.mesh.config.lora import adapter_form
from rollmesh.mesh.errors import DataError

if TYPE_CHECKING:
    from rollmesh.learner.algorithms.interface import Algorithm
    from rollmesh.mesh.config.learner import LearnerSection

OPTIMIZERS = "optimizers"
"""Key of the data stored with a checkpoint: the settings of each role's optimizer that its state depends on."""
ADAPTER = "adapter"
"""Key of the same about the adapter that is trained in place of the weights (`adapter_form`)."""
_ACTOR = "actor"
_FORM = ("name", "state_dtype")
_HINT = "resume with the algorithm that wrote it, or start a run under another name"


def check_newest(root: Path, algorithm: Algorithm, learner: LearnerSection) -> None:
    """Refuses an algorithm, optimizers or an adapter that cannot continue from the newest checkpoint of a run.

    Args:
        root: folder of the checkpoints; may be absent.
        algorithm: of the run.
        learner: as configured.

    Raises:
        DataError: naming the difference. A damaged checkpoint is named where it is loaded.
    """
    if (version := newest_version(root)) is None:
        return
    folder = root / checkpoint_name(version)
    check_roles(folder, (role.name for role in algorithm.needs.roles if role.trained))
    if (extra := _extra(folder)) is not None:
        algorithm_state(folder, extra, algorithm)
    check_optimizers(folder, optimizer_forms(learner, algorithm))
    check_adapter_form(folder, adapter_form(learner.lora))


def optimizer_forms(learner: LearnerSection, algorithm: Algorithm) -> dict[str, dict[str, str]]:
    """The settings that the form of an optimizer's state depends on, of each role that is trained."""
    sections = {_ACTOR: learner.optimizer}
    for role in algorithm.needs.roles:
        if role.trained:
            own = learner.roles.get(role.name)
            sections[role.name] = (own and own.optimizer) or learner.optimizer
    return {role: {key: getattr(section, key) for key in _FORM} for role, section in sections.items()}


def check_optimizers(folder: Path, forms: Mapping[str, Mapping[str, str]]) -> None:
    """Refuses optimizers that cannot take over the state of a checkpoint's. A damaged one is named at its load.

    Args:
        folder: of the checkpoint.
        forms: see `optimizer_forms`.

    Raises:
        DataError: names the setting and both values.
    """
    stored = (_extra(folder) or {}).get(OPTIMIZERS)
    for role, form in forms.items():
        written = stored.get(role) if isinstance(stored, dict) else None
        for key, value in form.items():
            before = written.get(key, value) if isinstance(written, dict) else value
            if before != value:
                raise DataError(
                    f"the optimizer of {role} has {key}: {value}, and checkpoint {folder} was written with {before}",
                    hint=f"set learner.optimizer.{key}={before} (or that of learner.roles.{role}), or start a run "
                    "under another name",
                )


def check_adapter_form(folder: Path, form: Mapping[str, str]) -> None:
    """Refuses an adapter of another shape or scale than a checkpoint's, whose weights would mean something else.

    Args:
        folder: of the checkpoint.
        form: see `adapter_form`.

    Raises:
        DataError: names the key and both values.
    """
    stored = (_extra(folder) or {}).get(ADAPTER)
    for key, value in form.items():
        before = stored.get(key, value) if isinstance(stored, dict) else value
        if before != value:
            raise DataError(
                f"{key} is {value}, and checkpoint {folder} was written with {before}",
                hint="set it as it was, or start a run under another name, whose learner.lora.start_from may be the "
                "adapter that `rollmesh export --adapter` writes",
            )


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


def _extra(folder: Path) -> dict[str, Any] | None:
    """The data stored with the weights; None where it cannot be read."""
    try:
        extra = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))["extra"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return extra if isinstance(extra, dict) else None


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
