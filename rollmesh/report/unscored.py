"""Members of trained groups without a reward: their number, reasons, and the newest cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.report.metrics import Record, is_training, metric_value

_PREFIX = "unscored/"
# Characters of a cause that fit into a line.
_CHARACTERS = 200


@dataclass(slots=True)
class UnscoredMembers:
    """Sums over training steps.

    Attributes:
        members: all members of the steps, those with a reward included.
        codes: members without a reward by code.
        cause: of the newest one.
    """

    members: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    cause: str = ""

    def to_wire(self) -> dict[str, Any]:
        """The sums as JSON."""
        return {"members": self.members, "codes": dict(self.codes), "cause": self.cause}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> UnscoredMembers:
        """Inverse of `to_wire`."""
        return cls(wire["members"], Counter(wire["codes"]), wire["cause"])

    def add(self, records: Iterable[Record]) -> None:
        """Adds records in the order in which they were made; those of evaluations are passed over."""
        for record in filter(is_training, records):
            found = {name: int(metric_value(record, name) or 0) for name in record if name.startswith(_PREFIX)}
            self.codes.update({name.removeprefix(_PREFIX): count for name, count in found.items()})
            self.members += int(metric_value(record, "samples") or 0) + sum(found.values())
            self.cause = str(record.get("unscored_cause", self.cause))

    def text(self) -> str:
        """The sums in words; empty where every member has a reward."""
        if not self.codes:
            return ""
        counts = ", ".join(f"{code} {count}" for code, count in self.codes.most_common())
        cause = self.cause if len(self.cause) <= _CHARACTERS else f"{self.cause[:_CHARACTERS]} ..."
        return (
            f"{self.codes.total()} of {self.members} responses have no reward ({counts}); newest cause: {cause or '-'}"
        )
