"""Members of trained groups that have no reward: how many, why, and what the newest of them said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.report.metrics import Record, is_training
from rollmesh.report.series import number

_PREFIX = "unscored/"
# Of a cause, where a line has to hold it.
_CHARACTERS = 200


@dataclass(slots=True)
class Unscored:
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
        """As JSON."""
        return {"members": self.members, "codes": dict(self.codes), "cause": self.cause}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Unscored:
        """Inverse of `to_wire`."""
        return cls(wire["members"], Counter(wire["codes"]), wire["cause"])

    def note(self, records: Iterable[Record]) -> None:
        """Takes in records in the order in which they were made; those of evaluations are passed over."""
        for record in filter(is_training, records):
            found = {name: int(number(record, name) or 0) for name in record if name.startswith(_PREFIX)}
            self.codes.update({name.removeprefix(_PREFIX): count for name, count in found.items()})
            self.members += int(number(record, "samples") or 0) + sum(found.values())
            self.cause = str(record.get("unscored_cause", self.cause))

    def text(self) -> str:
        """In words; empty where every member has a reward."""
        if not self.codes:
            return ""
        counts = ", ".join(f"{code} {count}" for code, count in self.codes.most_common())
        cause = self.cause if len(self.cause) <= _CHARACTERS else f"{self.cause[:_CHARACTERS]} ..."
        return (
            f"{self.codes.total()} of {self.members} responses have no reward ({counts}); newest cause: {cause or '-'}"
        )
