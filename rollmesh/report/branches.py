"""Turns of agents that are in no trajectory, over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.mesh.trajectory.branches import DROPPED, MANY, Cause, branches_text
from rollmesh.report.metrics import Record, is_training, metric_value


@dataclass(slots=True)
class Branches:
    """Sums over training steps, in turns.

    Attributes:
        turns: in trajectories.
        causes: in branches, by cause.
    """

    turns: float = 0.0
    causes: dict[Cause, float] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Branches:
        """Sums over records; those of evaluations are passed over, and those of runs without sessions."""
        found = cls()
        for record in filter(is_training, records):
            if metric_value(record, f"agent/{DROPPED}/mean") is None:
                continue
            samples = metric_value(record, "samples") or 0.0
            found.turns += samples * (metric_value(record, "agent/turns/mean") or 0.0)
            for cause in Cause:
                dropped = samples * (metric_value(record, f"agent/{cause.metric}/mean") or 0.0)
                found.causes[cause] = found.causes.get(cause, 0.0) + dropped
        return found

    def to_wire(self) -> dict[str, Any]:
        """The sums as JSON."""
        return {"turns": round(self.turns), "causes": {str(cause): round(n) for cause, n in self.causes.items() if n}}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Branches:
        """Inverse of `to_wire`."""
        return cls(wire["turns"], {Cause(cause): count for cause, count in wire["causes"].items()})

    @property
    def share(self) -> float:
        """Turns in branches over all turns."""
        dropped = sum(self.causes.values())
        return dropped / (self.turns + dropped) if dropped else 0.0

    @property
    def text(self) -> str:
        """The sums in words; empty where there is no branch."""
        return branches_text(self.turns, self.causes)

    @property
    def warning(self) -> str:
        """The same where there are many; else empty."""
        return self.text if self.share > MANY else ""
