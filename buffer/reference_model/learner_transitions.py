"""The learner's commands on one table, in the pure state machine: leases, and claims of batches.

Invariants: a lease and a claim are judged by the bound at the version that trains. A claim takes all or nothing, each
group once, and gives the reason of each lease that it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.buffer.policy.rules import Order
from rollmesh.buffer.protocol.leases import LEARNER, Lease
from rollmesh.buffer.reference_model.generator_transitions import GeneratorTransitions
from rollmesh.buffer.reference_model.group_states import Group, GroupState
from rollmesh.buffer.reference_model.reuse import may_be_used_again


class LearnerTransitions(GeneratorTransitions):
    """A table as a learner takes batches from it."""

    def sample(self, incarnation: int, version: int, group_ids: Sequence[str], now: int) -> list[Group]:
        """Leases proposed groups for one version; state, bound and quota decide again."""
        self._fence(incarnation)
        room = len(group_ids)
        if self.rules.bounded:
            taken = sum(g.state is GroupState.LEASED and g.for_version == version for g in self.groups.values())
            room = self.rules.groups_per_step - taken if version >= self.u else 0
        leased: list[Group] = []
        for group_id in group_ids:
            group = self.groups.get(group_id)
            if len(leased) < room and group and group.state is GroupState.READY and group.deadline >= version:
                self._draw(group)
                group.state, group.holder, group.lease = GroupState.LEASED, LEARNER, self._new_lease("s")
                group.for_version = version
                leased.append(group)
        if leased:
            self.holders.setdefault(LEARNER, now + self.rules.lease_ms)
        return leased

    def claim(self, incarnation: int, version: int, leases: Sequence[Lease]) -> list[tuple[str, str, str]]:
        """Consumes all groups or none; returns the refusals, each of one lease: (group id, reason, lease)."""
        self._fence(incarnation)
        refused, fresh, living = [], list[Group](), set[str]()
        for group_id, lease in leases:
            why = self._refusal(group_id, lease, version)
            if why != "lease_lost":
                why = "listed_twice" if group_id in living else why
                living.add(group_id)
            if why:
                refused.append((group_id, why, lease))
            elif not self._was_claimed(group_id, lease):
                fresh.append(self.groups[group_id])
        if refused or not fresh:
            return refused
        if self.rules.bounded and version != self.u:
            why = "version_claimed" if version < self.u else "version_ahead"
            return [(group.group_id, why, group.lease) for group in fresh]
        self.progress += 1
        for group in fresh:
            self._use(group, version)
        if self.rules.bounded:
            self.u = version + 1
        return []

    def _was_claimed(self, group_id: str, lease: str) -> bool:
        group = self.groups.get(group_id)
        return group is not None and bool(group.uses) and group.claimed == lease

    def _refusal(self, group_id: str, lease: str, version: int) -> str:
        group = self.groups.get(group_id)
        claimed = self._was_claimed(group_id, lease)
        if group is None or (not claimed and (group.lease != lease or group.state is not GroupState.LEASED)):
            return "lease_lost"
        if group.uses and (group.uses[-1] != version if claimed else group.uses[-1] >= version):
            return f"claimed_at_{group.uses[-1]}"
        if claimed:
            return ""
        return "over_bound" if group.deadline < version else ""

    def _use(self, group: Group, version: int) -> None:
        group.uses.append(version)
        group.claimed = group.lease
        self.counts["uses"] += 1
        if may_be_used_again(group.uses, group.deadline, self.rules.max_reuse):
            self._make_ready(group)
        else:
            group.state, group.holder = GroupState.CONSUMED, ""

    def _draw(self, group: Group) -> None:
        if self.rules.order is Order.PRIORITY:
            ready = (g.weight for g in self.groups.values() if g.state is GroupState.READY)
            group.chance = group.weight / sum(ready)
            self._race = max(self._race, group.order)
