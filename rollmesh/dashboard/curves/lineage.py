"""The records of a run's surviving lineage, kept up as records come."""

from __future__ import annotations

from rollmesh.dashboard.curves.columns import RecordColumns
from rollmesh.report.metrics import Record, is_evaluation, is_training, step_of
from rollmesh.training.summary import HELD_OUT


class Lineage:
    """Steps and evaluations; a step that a resumed learner trained again replaces the discarded one and all after it.

    Args:
        of_training: the run trains on data: each record is of a step, and may have values of an evaluation too.

    Attributes:
        steps, evaluations: their records.
    """

    def __init__(self, *, of_training: bool) -> None:
        self._of_training = of_training
        self._last_step = -1
        self.steps, self.evaluations = RecordColumns(), RecordColumns()

    def add(self, record: Record) -> None:
        """Adds the next record, unless it is of no step that a run reaches."""
        if (step := step_of(record)) is None:
            return
        if self._of_training or is_training(record):
            if step <= self._last_step:
                _undo(self.steps, step)
                _undo(self.evaluations, step)
            self._last_step = step
            self.steps.append(record)
        if HELD_OUT in record if self._of_training else is_evaluation(record):
            self.evaluations.append(record)


def _undo(columns: RecordColumns, step: int) -> None:
    """Removes the records of a step and of all later ones; evaluations may come in another order than steps."""
    kept = columns.column("step") < step
    if not kept.all():
        columns.keep(kept)
