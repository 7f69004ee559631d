"""The state of a training on data, in progress or ended, by its folder alone: it has no mesh that could be asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rollmesh.mesh.errors import DataError
from rollmesh.run_files import is_in_use, trained_by
from rollmesh.training.summary import (
    IN_PROGRESS,
    TrainingSummary,
    build_training_summary,
    read_training_summary,
)


def training_state(folder: Path) -> TrainingSummary | None:
    """The state of a training; None where `folder` is not that of one.

    Raises:
        DataError: a file of it cannot be read.
    """
    command = trained_by(folder)
    if command is None:
        return None
    if is_in_use(folder):
        return build_training_summary(folder, command, IN_PROGRESS)
    try:
        written = read_training_summary(folder)
    except DataError:
        # A process that was killed has left none, or that of the one before.
        return build_training_summary(folder, command, "killed")
    found = build_training_summary(folder, command, written.ended, written.wall_s)
    return found if found.steps == written.steps else dataclasses.replace(found, ended="killed")


def newest_in_progress(runs: Path) -> Path | None:
    """The folder of the training below a folder of runs that has last begun, of those in progress."""
    begun = [folder for folder in runs.glob("*") if trained_by(folder) is not None and is_in_use(folder)]
    return max(begun, key=lambda folder: folder.stat().st_mtime, default=None)
