"""A table's counters as a front last saw them. Every script's answer carries them; `rev` says which are newer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """Counters of one table, in the order in which the scripts return them.

    Attributes:
        rev: grows with every change.
        incarnation, version: the policy in force; incarnation 0 while no learner has come yet.
        u: version at which the next unclaimed batch will train.
        generating, ready, leased, consumed: groups by state.
        pending: prompt tasks not admitted yet.
        end_of_data: 1 when no further task will come.
        bytes, reserved: payload bytes stored, and set aside for groups being generated.
        orphaned: generating groups that wait for a new holder.
        cancelled: groups ever cancelled at their generator.
        first_deadline: the least deadline among generating and ready groups.
        demand: uses that the unclaimed groups demand, which the gate counts.
        suspect: 1 while acknowledged state may be lost, and the learner has not said yet what it has used.
    """

    rev: int = 0
    incarnation: int = 0
    version: int = 0
    u: int = 0
    generating: int = 0
    ready: int = 0
    leased: int = 0
    consumed: int = 0
    pending: int = 0
    end_of_data: int = 0
    bytes: int = 0
    reserved: int = 0
    orphaned: int = 0
    cancelled: int = 0
    first_deadline: int = 1 << 60
    demand: int = 0
    suspect: int = 0

    @classmethod
    def from_reply(cls, values: Sequence[int]) -> TableSnapshot:
        return cls(*map(int, values))

    @property
    def has_unclaimed(self) -> bool:
        """Whether there are tasks or groups that the learner has not claimed."""
        return self.pending + self.generating + self.ready + self.leased > 0

    @property
    def exhausted(self) -> bool:
        """True if no further group can become ready."""
        return bool(self.end_of_data) and not (self.pending or self.generating or self.ready)
