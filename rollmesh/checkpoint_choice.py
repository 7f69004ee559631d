"""The choice of a run's checkpoint: the best one, or one by its name."""

from __future__ import annotations

from pathlib import Path

from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.mesh.errors import DataError

BEST = "best"
"""Name that stands for the best checkpoint."""


def checkpoint_path(run: Path, name: str) -> Path:
    """A checkpoint of a run.

    Args:
        run: folder.
        name: of the checkpoint's folder, or `BEST`.

    Raises:
        DataError: no checkpoint has this name.
    """
    if name == BEST:
        return best_checkpoint_path(run)
    there = {path.name: path for _, path in list_checkpoints(run / CHECKPOINTS_NAME)}
    if name not in there:
        raise DataError(
            f"run {run} has no checkpoint {name!r}", hint=f"it has: {', '.join([BEST, *there]) if there else 'none'}"
        )
    return there[name]


def best_checkpoint_path(run: Path) -> Path:
    """The checkpoint of a run with the best evaluation.

    Raises:
        DataError: no checkpoint is the best one yet.
    """
    best = best_checkpoint(run / CHECKPOINTS_NAME)
    if best is None:
        raise DataError(
            f"run {run} has no best checkpoint",
            hint="it needs data.eval, checkpoint.best, and one finished evaluation (`rollmesh evals`)",
        )
    return run / CHECKPOINTS_NAME / best.checkpoint
