"""Compatibility of checkpoints with algorithm, optimizers, adapter and frozen parts.

It is checked before a start, on the files, and at a load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.learner.checkpoint.names import checkpoint_name, newest_version
from rollmesh.learner.engines.interface import STATE_NAME
from rollmesh.mesh.config.learner import EngineSection, LearnerSection
from rollmesh.mesh.config.lora import adapter_form
from rollmesh.mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rollmesh.learner.algorithms.interface import Algorithm

OPTIMIZERS = "optimizers"
"""Key of the data stored with a checkpoint: the settings of each role's optimizer that its state depends on."""
ADAPTER = "adapter"
"""Key of the same about the adapter that is trained in place of the weights (`adapter_form`)."""
FROZEN = "frozen"
"""Key of the same about the parts of the model that are not trained."""
_ACTOR = "actor"
_FORM = ("name", "state_dtype")
_ANOTHER = "start a run under another name, whose model.path may be the folder that `rollmesh export` writes"
_HINT = "resume with the algorithm that wrote it, or start a run under another name"


def check_newest(root: Path, algorithm: Algorithm, learner: LearnerSection) -> None:
    """Refuses an algorithm, optimizers, an adapter or frozen parts that cannot continue from a run's newest checkpoint.

    Args:
        root: folder of the checkpoints; may be absent.
        algorithm: of the run.
        learner: as configured.

    Raises:
        ConfigError: see `check_form`.
        DataError: naming the difference. A damaged checkpoint is named where it is loaded.
    """
    if (version := newest_version(root)) is None:
        return
    folder = root / checkpoint_name(version)
    check_roles(folder, (role.name for role in algorithm.needs.roles if role.trained))
    if (extra := _extra(folder)) is not None:
        algorithm_state(folder, extra, algorithm)
    check_form(folder, trained_form(learner, algorithm))


def trained_form(learner: EngineSection, algorithm: Algorithm | None = None) -> dict[str, Any]:
    """The settings that the form of a checkpoint depends on, as they are stored with it.

    Args:
        learner: of a run, or of a trainer.
        algorithm: of the run; a trainer has none, and trains the actor alone.
    """
    sections = {_ACTOR: learner.optimizer}
    if algorithm is not None and isinstance(learner, LearnerSection):
        for role in algorithm.needs.roles:
            if role.trained:
                own = learner.roles.get(role.name)
                sections[role.name] = (own and own.optimizer) or learner.optimizer
    return {
        OPTIMIZERS: {role: {key: getattr(section, key) for key in _FORM} for role, section in sections.items()},
        ADAPTER: adapter_form(learner.lora),
        FROZEN: sorted(set(learner.frozen)),
    }


def check_form(folder: Path, form: Mapping[str, Any]) -> None:
    """Refuses settings that cannot take over the state of a checkpoint. A damaged one is named at its load.

    Args:
        folder: of the checkpoint.
        form: see `trained_form`.

    Raises:
        ConfigError: names the setting and both values.
    """
    stored = _extra(folder) or {}
    _check_optimizers(folder, stored.get(OPTIMIZERS), form[OPTIMIZERS])
    _check_adapter(folder, stored.get(ADAPTER), form[ADAPTER])
    before = stored.get(FROZEN, form[FROZEN])
    if before != form[FROZEN]:
        # The moments of a part that was not trained are not there, nor would those of another one ever be used.
        was, now = (", ".join(map(str, parts)) or "nothing" for parts in (before, form[FROZEN]))
        raise ConfigError(
            f"learner.frozen is {now}, and checkpoint {folder} was written with {was}",
            hint=f"set learner.frozen=[{','.join(map(str, before))}], or {_ANOTHER}",
        )


def _check_optimizers(folder: Path, stored: object, forms: Mapping[str, Mapping[str, str]]) -> None:
    for role, form in forms.items():
        written = stored.get(role) if isinstance(stored, Mapping) else None
        for key, value in form.items():
            before = written.get(key, value) if isinstance(written, Mapping) else value
            if before != value:
                of = "learner.optimizer" if role == _ACTOR else f"learner.roles.{role}.optimizer"
                raise ConfigError(
                    f"the optimizer of {role} has {key}: {value}, and checkpoint {folder} was written with {before}",
                    hint=f"set {of}.{key}={before}, or {_ANOTHER}",
                )


def _check_adapter(folder: Path, stored: object, form: Mapping[str, str]) -> None:
    """Refuses an adapter of another shape or scale, whose weights would mean something else."""
    for key, value in form.items():
        before = stored.get(key, value) if isinstance(stored, Mapping) else value
        if before != value:
            raise ConfigError(
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
