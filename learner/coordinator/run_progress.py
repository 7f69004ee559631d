"""The progress of a run, which every checkpoint stores in addition to the state of the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.learner.metrics.run_totals import RunTotals
from rollmesh.mesh.trajectory.lineage import Lineage


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The run from the point of view of its present learner.

    Attributes:
        lineage: the incarnations, this learner's last.
        totals: over all learners; updated as the run continues.
    """

    lineage: Lineage
    totals: RunTotals

    @property
    def incarnation(self) -> int:
        """The incarnation of this learner."""
        return self.lineage.resumed[-1][0]

    @property
    def resumed_at(self) -> int:
        """The version from which this learner continues the run."""
        return self.lineage.resumed[-1][1]

    @classmethod
    def resume(cls, extra: Mapping[str, Any], incarnation: int, version: int) -> RunProgress:
        """The progress that a checkpoint stores (empty for a new run), continued by `incarnation` from `version`."""
        lineage = Lineage.from_wire(extra.get("lineage", [])).with_takeover(incarnation, version)
        return cls(lineage, _stored_totals(extra))

    @classmethod
    def replay(cls, extra: Mapping[str, Any], lineage: Lineage) -> RunProgress:
        """The progress of a replay of recorded batches, with the totals that a checkpoint stores."""
        return cls(lineage, _stored_totals(extra))

    def to_wire(self) -> dict[str, object]:
        """The progress as JSON, for the checkpoint."""
        return {"lineage": self.lineage.to_wire(), **self.totals_to_wire()}

    def totals_to_wire(self) -> dict[str, object]:
        """The totals alone: a replay continues no lineage."""
        return {"totals": self.totals.to_wire()}


def _stored_totals(extra: Mapping[str, Any]) -> RunTotals:
    return RunTotals.from_wire(extra["totals"]) if "totals" in extra else RunTotals()
