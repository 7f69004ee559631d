"""Files of a run folder: its configurations, those of its last launch, and the lock that says whether it is in use."""

from __future__ import annotations

import fcntl
from pathlib import Path

from rollmesh.learner.recovery.run_identity import CONFIG
from rollmesh.learner.trainers.identity import COMMAND
from rollmesh.mesh.config import load_as, load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import CONFIGS, TrainerConfig
from rollmesh.mesh.errors import ConfigError, DataError

RUN = "run"
"""The command `rollmesh run`."""
LAUNCH = Path("services", CONFIG)
"""Configuration of a launch; it becomes the run's own once the learner has taken the run over."""
SNAPSHOTS = "mesh.jsonl"
"""The launcher's snapshots of the mesh."""
SUMMARY = "summary.json"
LOCK = "run.lock"
"""File that the command which works in a folder holds locked."""


def is_run(folder: Path) -> bool:
    """True where a run was ever launched here."""
    return (folder / CONFIG).exists() or (folder / LAUNCH).exists()


def is_in_use(folder: Path) -> bool:
    """True where a command works in a run folder now, and where that is unknown."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def config_path(folder: Path) -> Path:
    """The configuration with which the run was last taken over; of one that never was, that of its last launch.

    Raises:
        DataError: the folder is not a run folder.
    """
    if not is_run(folder):
        raise DataError(f"{folder} is not a run folder: it has no {CONFIG}", hint="give the folder of a run")
    return folder / (CONFIG if (folder / CONFIG).exists() else LAUNCH)


def trained_by(folder: Path) -> str | None:
    """The command that trains on data in a folder: `sft`, `rm` or `dpo`; None for the folder of `rollmesh run`."""
    path = folder / COMMAND
    command = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return command if command in CONFIGS else None


def check_command(folder: Path, command: str) -> None:
    """Refuses to begin a command in the folder of another one.

    Args:
        folder: of the run; it may be absent.
        command: `RUN`, `sft`, `rm` or `dpo`.

    Raises:
        ConfigError: another command has begun there.
    """
    found = trained_by(folder) or (RUN if is_run(folder) else command)
    if found != command:
        raise ConfigError(
            f"{folder} is the folder of a `rollmesh {found}`",
            hint="choose a --run.name of its own, or start over with --fresh, which keeps it under another name",
        )


def read_any_config(folder: Path) -> Config | TrainerConfig:
    """The configuration of a run, or of a training on data.

    Raises:
        DataError: the folder is not a run folder.
    """
    command = trained_by(folder)
    return read_config(folder) if command is None else load_as(CONFIGS[command], config_path(folder), command=command)


def read_config(folder: Path) -> Config:
    """The configuration at `config_path`.

    Raises:
        DataError: the folder is not that of `rollmesh run`.
    """
    if (command := trained_by(folder)) is not None:
        raise DataError(
            f"{folder} is the folder of `rollmesh {command}`, which has no mesh, no rewards and no responses",
            hint="`rollmesh status`, `report`, `evals`, `compare` and `export` take it",
        )
    return load_config(config_path(folder))


def read_launch(folder: Path) -> Config:
    """The configuration of the last launch, which may be in progress.

    Raises:
        DataError: as `read_config`.
    """
    return load_config(folder / LAUNCH) if (folder / LAUNCH).exists() else read_config(folder)
