"""The evaluations of a training on data, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollmesh.learner.checkpoint.best import Best, best_checkpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.training.summary import evaluations, training_records


def training_result_grid(folder: Path) -> list[list[str]]:
    """The evaluations as a table with its head, the best one marked; empty without any."""
    return evaluation_rows(evaluations(training_records(folder)), best_checkpoint(folder / CHECKPOINTS_NAME))


def evaluation_rows(found: Sequence[Mapping[str, float]], best: Best | None) -> list[list[str]]:
    """A table with its head; empty without an evaluation.

    Args:
        found: evaluations, as `training.summary.evaluations` gives them.
        best: the best checkpoint, whose evaluation is marked.
    """
    if not found:
        return []
    names = list(dict.fromkeys(name for one in found for name in one if name != "step"))
    rows = [["step", *names, ""]]
    for one in found:
        mark = f"best by {best.metric}" if best is not None and best.version == one["step"] else ""
        cells = (f"{one[name]:.4f}" if name in one else "-" for name in names)
        rows.append([f"{one['step']:.0f}", *cells, mark])
    return rows
