"""The generators' commands on one table, as the pure state machine has them: admission, leases, members, drafts."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.buffer.policy.rules import Order
from rollmesh.buffer.policy.version_ranges import VersionRanges
from rollmesh.buffer.protocol.leases import Lease
from rollmesh.buffer.reference_model.drafts import Draft, grant_drafts
from rollmesh.buffer.reference_model.group_states import ID_GAP_AFTER_LOSS, Fate, Group, GroupState, Task
from rollmesh.buffer.reference_model.table_state import TableState
from rollmesh.mesh.trajectory.versions import PolicyVersion

# Different reasons of unscored members that a group keeps.
MAX_CAUSES = 8


class GeneratorTransitions(TableState):
    """A table as generators change it."""

    def admit(
        self, member: str, serving: PolicyVersion, wanted: int, live_limit: int, now: int, *, evaluating: bool = False
    ) -> list[Group]:
        """Orphans first (they skip the gate, not the bound), then pending tasks while the gate is open.

        With bound 0 it is closed during an evaluation.
        """
        if self.suspect or serving.incarnation != self.lineage.incarnation:
            return []
        granted: list[Group] = []
        for pin in (str(serving), ""):
            orphans = sorted((g for g in self.groups.values() if g.orphan and g.task.pin == pin), key=lambda g: g.seq)
            for group in orphans[:wanted]:
                before, group.grant = group.grant, serving
                deadline = self._deadline(group)
                if len(granted) < wanted and deadline >= self.u:
                    group.deadline = deadline
                    self.counts["readmissions"] += 1
                    group.attempt = group.attempts + self._losses * ID_GAP_AFTER_LOSS
                    granted.append(self._granted(group, member))
                else:
                    group.grant = before
        for pin in (str(serving), ""):
            while len(granted) < wanted:
                task = min((t for t in self.pending if t.pin == pin), key=_pending_order, default=None)
                if task is None or not self._is_open(live_limit, task, evaluating):
                    break
                self.pending.remove(task)
                granted.append(self._granted(self._admitted(task, serving), member))
        if granted:
            self.holders.setdefault(member, now + self.rules.lease_ms)
        return granted

    def _is_open(self, live_limit: int, task: Task, evaluating: bool) -> bool:
        if not self.rules.bounded:
            return True
        if evaluating and not self.rules.max_staleness:
            return False
        room = self.demand + self.rules.samples_per_insert - 1 < live_limit
        return room and self.bytes + self.reserved + task.reserve <= self.rules.max_bytes

    def _admitted(self, task: Task, serving: PolicyVersion) -> Group:
        self._seq += 1
        self.counts["admitted"] += 1
        group = Group(f"{self.name}-{self._seq}", task, self._seq, serving, order=self._seq, done=[False] * task.n)
        group.deadline = self._deadline(group)
        self.groups[group.group_id] = group
        return group

    def _granted(self, group: Group, member: str) -> Group:
        if group.attempt:
            self._cancel(group)
        group.lease = self._new_lease("a")
        group.attempt += 1
        group.holder, group.previous_holder, group.orphan = member, "", False
        self._grant_drafts(group)
        return group

    def _grant_drafts(self, group: Group) -> None:
        self.granted_drafts[group.group_id] = grant_drafts(group, self.drafts[group.group_id], self._deadline, self.u)

    def leave(self, member: str) -> None:
        """Ends the leases of a generator that leaves in order."""
        self.cancels.leave(member)
        self.streams.discard(member)
        for group in self.groups_held_by(member):
            self._release_lease(group, 0)
        self.holders.pop(member, None)

    def attach(self, holder: str, now: int) -> list[Group]:
        """Opens a holder's stream (again): its leases, present and next, get a full term."""
        self.streams.add(holder)
        held = self.groups_held_by(holder)
        for group in held:
            if group.state is GroupState.GENERATING:
                self._grant_drafts(group)
        if held:
            self.holders[holder] = now + self.rules.lease_ms
        else:
            self.holders.pop(holder, None)
        return held

    def detach(self, holder: str, now: int) -> None:
        """Ends a holder's stream: its leases keep the reconnect grace."""
        if holder in self.streams:
            self.streams.remove(holder)
            if holder in self.holders:
                self.holders[holder] = min(self.holders[holder], now + self.rules.grace_ms)

    def renew(self, holder: str, now: int) -> None:
        """Renews the leases of a holder, which lives."""
        if holder in self.holders and holder in self.streams:
            self.holders[holder] = now + self.rules.lease_ms

    def end_unnamed_leases(self, holder: str, named: Sequence[Lease]) -> tuple[list[str], list[Lease]]:
        """Ends leases that a holder has not named in its inventory.

        The holder keeps the groups in `named` that it holds under a lease named there.

        Returns:
            The groups that are taken from it, and the named leases that are dead. If a group waits for its next holder,
            the last one may still write.
        """
        alive = {Lease(group.group_id, group.lease) for group in self.groups_held_by(holder)}
        waiting = {Lease(group.group_id, group.lease) for group in self.groups.values() if group.orphan}
        kept = {group_id for group_id, lease in named if (group_id, lease) in alive}
        listed = {group_id for group_id, _ in named}
        forgotten = [group for group in self.groups_held_by(holder) if group.group_id in listed - kept]
        for group in forgotten:
            self._end_lease(group, 1)
        dead = [lease for lease in named if lease[1] and lease not in alive | waiting]
        return [group.group_id for group in forgotten], dead

    def release(self, member: str, leases: Sequence[Lease]) -> int:
        """Gives up groups being generated; this costs no attempt."""
        released = 0
        for group_id, lease in leases:
            group = self.groups.get(group_id)
            if group and group.state is GroupState.GENERATING and group.holder == member and group.lease == lease:
                self._release_lease(group, 0)
                released += 1
        return released

    def _may_write(self, group: Group, lease: str, attempt: int) -> bool:
        if group.payload_lost or group.attempt != attempt:
            return False
        return group.state is not GroupState.GENERATING or group.lease == lease

    def write_draft(
        self, group_id: str, lease: str, attempt: int, member: int, *, tokens: int, ranges: VersionRanges
    ) -> str:
        """Writes a member's response so far: stored / duplicate / superseded / rejected. It counts nowhere."""
        group = self.groups.get(group_id)
        if group is None or not group.task.n:
            return "superseded"
        if member >= group.task.n:
            return "rejected"
        if not self._may_write(group, lease, attempt):
            return "superseded"
        known = self.drafts[group_id].get(member)
        if group.done[member] or (known and not known.is_older_than(attempt, tokens)):
            return "duplicate"
        self.drafts[group_id][member] = Draft(attempt, tokens, ranges)
        self.progress += not known or tokens > known.tokens
        return "stored"

    def write(
        self,
        group_id: str,
        lease: str,
        attempt: int,
        member: int,
        *,
        scored: bool,
        size: int,
        ranges: VersionRanges,
        tokens: int = 0,
        reason: str = "",
    ) -> tuple[str, bool]:
        """Writes one member's outcome: (stored / duplicate / superseded / rejected, whether it sealed the group)."""
        group = self.groups.get(group_id)
        if group is None or not group.task.n:
            self.counts["superseded_writes"] += 1
            return "superseded", False
        if member >= group.task.n:
            return "rejected", False
        valid = self._may_write(group, lease, attempt)
        # A late repetition of what an earlier attempt has stored is no less a duplicate: that value is in use.
        if (valid and group.done[member]) or (member, attempt) in group.payloads:
            self.counts["duplicate_writes"] += 1
            return "duplicate", False
        if not valid:
            self.counts["superseded_writes"] += 1
            return "superseded", False
        group.done[member] = True
        self.progress += 1
        self.drafts[group_id].pop(member, None)
        if not scored:
            self._record_cause(group, reason)
        else:
            group.scored += 1
            group.bytes += size
            group.tokens += tokens
            group.ranges = group.ranges.merged(ranges)
            group.payloads.append((member, attempt))
            group.deadline = self._deadline(group)
        if all(group.done):
            self._seal(group)
            return "stored", True
        return "stored", False

    def _record_cause(self, group: Group, reason: str) -> None:
        if reason not in group.causes and len(group.causes) < MAX_CAUSES:
            group.causes.append(reason)

    def _seal(self, group: Group) -> None:
        if group.scored < self.rules.min_members:
            self._finish(group, Fate.FAILED, "too_few_scored")
            return
        if self.rules.order is not Order.IN_ORDER:
            self._seals += 1
            group.seal = group.order = self._seals
        self._make_ready(group)


def _pending_order(task: Task) -> tuple[int, str]:
    return (task.ordinal, task.parent)
