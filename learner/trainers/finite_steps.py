"""The steps of a training whose loss and gradient are finite: one without any leaves nothing worth a folder.

A loss may overflow while its gradient is finite, as with margins near the end of float32's range.
"""

from __future__ import annotations

import math

from rollmesh.learner.engines.interface import StepResult
from rollmesh.mesh.errors import DivergedError


class FiniteSteps:
    """Counts steps until the first finite one.

    Args:
        before: an earlier process had a finite one.
    """

    def __init__(self, *, before: bool = False) -> None:
        self._found = before
        self._others = 0

    @property
    def missing(self) -> bool:
        """True where steps were to be taken, and none of them was finite."""
        return self._others > 0 and not self._found

    def record(self, result: StepResult) -> None:
        """Counts a step; one that had nothing to train does not count."""
        if not result.metrics:
            return
        if result.skipped or not math.isfinite(result.metrics["loss"]):
            self._others += 1
        else:
            self._found = True

    def check_end(self) -> None:
        """Refuses the end of a training without a finite step, however few its steps are.

        Raises:
            DivergedError: there was none.
        """
        if self.missing:
            raise DivergedError(
                f"none of {self._others} steps had a finite loss and a finite gradient: no model is left",
                hint="see loss and grad_norm in metrics.jsonl; look at the rows for extreme values",
            )
