"""The record of a reward for a reader, kept with a member as side data: neither Redis nor a training step sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.protos import trajectory_pb2

NAME = "reward"
"""Name of the side data."""


@dataclass(frozen=True, slots=True)
class RewardRecord:
    """Contents of a score besides its numbers.

    Attributes:
        evidence: grounds.
        cost: of the score, in the currency of the reward service's owner.
        cached: it was found earlier, for equal content.
        scorers: versions of the service's scorers by name.
    """

    evidence: str = ""
    cost: float = 0.0
    cached: bool = False
    scorers: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """False where there is nothing to keep: the versions alone stand in the run's summary."""
        return bool(self.evidence or self.cost or self.cached)

    def to_bytes(self) -> bytes:
        """As JSON; what is empty is left out."""
        fields = {"evidence": self.evidence, "cost": self.cost, "cached": self.cached, "scorers": dict(self.scorers)}
        return json.dumps({name: value for name, value in fields.items() if value}).encode()


def entry_of(meta: trajectory_pb2.MemberMeta) -> trajectory_pb2.SideData | None:
    """The entry of a member's record; None where there is none."""
    return next((entry for entry in meta.side if entry.name == NAME), None)


def read_record(data: object) -> dict[str, Any]:
    """The fields of a stored record; empty where it cannot be read."""
    try:
        fields = json.loads(bytes(data)) if isinstance(data, bytes | bytearray | memoryview) else None
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
