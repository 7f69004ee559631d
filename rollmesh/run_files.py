"""The configurations in a run folder: the one of which the run is, and that of its last launch."""

from __future__ import annotations

from pathlib import Path

from rollmesh.learner.recovery.run_identity import CONFIG
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import DataError

LAUNCH = Path("services", CONFIG)
"""What the services of a launch read; it becomes the run's own once the learner has taken the run over."""


def is_run(folder: Path) -> bool:
    """Whether a run was ever launched here."""
    return (folder / CONFIG).exists() or (folder / LAUNCH).exists()


def config_path(folder: Path) -> Path:
    """The configuration with which the run was last taken over; of one that never was, that of its last launch.

    Raises:
        DataError: the folder is none of a run.
    """
    if not is_run(folder):
        raise DataError(f"{folder} is not a run folder: it has no {CONFIG}", hint="give the folder of a run")
    return folder / (CONFIG if (folder / CONFIG).exists() else LAUNCH)


def read_config(folder: Path) -> Config:
    """What is at `config_path`.

    Raises:
        DataError: the folder is none of a run.
    """
    return load_config(config_path(folder))


def read_launch(folder: Path) -> Config:
    """The configuration of the last launch, which may be going.

    Raises:
        DataError: the folder is none of a run.
    """
    return load_config(folder / LAUNCH) if (folder / LAUNCH).exists() else read_config(folder)
