"""The best checkpoint of a run folder."""

from __future__ import annotations

from pathlib import Path

from learner.checkpoint.best import best_checkpoint
from learner.checkpoint.names import CHECKPOINTS_NAME
from mesh.errors import DataError


def best_of(run: Path) -> Path:
    """The checkpoint of a run whose evaluation was the best.

    Raises:
        DataError: there is none.
    """
    best = best_checkpoint(run / CHECKPOINTS_NAME)
    if best is None:
        raise DataError(
            f"run {run} has no best checkpoint",
            hint="it needs data.eval, checkpoint.best, and one finished evaluation (`rollmesh evals`)",
        )
    return run / CHECKPOINTS_NAME / best.checkpoint
