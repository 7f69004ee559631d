"""The off-policy contract of one table as a pure state machine with an injected clock.

This is the reference for the Lua scripts. Hypothesis replays the same commands here and on a real Redis, and states,
answers and ledger must agree after every step. It does no I/O and reads no clock of its own; `now` is in ms.

Invariants: those of `buffer.reference_model.table_state`; and a group that is generating or ready trains by its
deadline or is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rollmesh.buffer.policy.rules import Order
from rollmesh.buffer.protocol.leases import LEARNER, Lease
from rollmesh.buffer.reference_model.group_order import freshest_key
from rollmesh.buffer.reference_model.group_states import ID_GAP_AFTER_LOSS, Fate, Group, GroupState, Task
from rollmesh.buffer.reference_model.learner_transitions import LearnerTransitions
from rollmesh.buffer.reference_model.resume_answers import ResumeAnswer
from rollmesh.buffer.reference_model.reuse import kept_uses, may_be_used_again
from rollmesh.buffer.reference_model.table_state import Suspect

# Scores by which the groups of a state are ranked.
_SCORES: Mapping[GroupState, Callable[[Group], float]] = {
    GroupState.GENERATING: lambda group: group.seq,
    GroupState.READY: lambda group: group.order,
    GroupState.LEASED: lambda group: group.for_version,
    GroupState.CONSUMED: lambda group: group.uses[-1],
}


class TableMachine(LearnerTransitions):
    """The commands of one table.

    Args:
        name: prefix of group ids.
        rules: the table's rules.
    """

    # ----------------------------------------------------------------------------------------------- seed

    def seed(
        self,
        incarnation: int,
        tasks: Sequence[Task],
        *,
        end_of_data: bool = False,
        withdraw: bool = False,
        call: int,
    ) -> tuple[int, int]:
        """Adds tasks; returns (added, withdrawn). `call` grows with every call of a learner."""
        self._fence(incarnation)
        news = (incarnation, call) > self.seed_call
        self.seed_call = max(self.seed_call, (incarnation, call))
        known = bool(tasks) and tasks[-1].ordinal <= self.seeded
        withdrawn = self.withdraw() if withdraw and news and not known else 0
        added = 0
        for task in tasks:
            if task.ordinal > self.seeded:
                self.seeded = task.ordinal
                if task.ordinal in self.used_ahead:
                    self.used_ahead.remove(task.ordinal)
                    continue
                self.pending.append(task)
                self.counts["seeded_tasks"] += 1
                added += 1
        if news and (end_of_data or added):
            self.end_of_data = end_of_data
        return added, withdrawn

    def withdraw(self) -> int:
        """Takes pending tasks back; without a bound also ends the unclaimed groups."""
        withdrawn = len(self.pending)
        self.pending.clear()
        self.counts["withdrawn"] += withdrawn
        if not self.rules.bounded:
            self._end_all(GroupState.GENERATING, GroupState.READY, GroupState.LEASED)
        return withdrawn

    def _end_all(self, *states: GroupState) -> None:
        for state in states:
            groups = [g for g in self.groups.values() if g.state is state]
            for group in sorted(groups, key=lambda g: (_SCORES[state](g), g.group_id)):
                self._finish(group, Fate.FAILED, "withdrawn")

    def redrive(self, group_ids: Sequence[str]) -> tuple[int, list[str]]:
        """Queues prompts of failed groups again: (how many, groups without a kept prompt)."""
        tasks, unknown = self.dead_letters.redrive(group_ids)
        self.pending += tasks
        self.counts["seeded_tasks"] += len(tasks)
        self.counts["redriven"] += len(tasks)
        return len(tasks), unknown

    # ------------------------------------------------------------------------------------------------ learner

    def set_priorities(self, incarnation: int, call: int, priorities: Iterable[tuple[str, float, int]]) -> int:
        """Changes (group id, priority, weight) of live groups; returns how many. `call` grows with every call."""
        self._fence(incarnation)
        changed = 0
        for group_id, priority, weight in priorities:
            group = self.groups.get(group_id)
            if group is not None and group.prioritized < (incarnation, call):
                group.priority, group.weight, group.prioritized = priority, weight, (incarnation, call)
                if group.state is GroupState.READY and self.rules.order is Order.PRIORITY:
                    self._draw_key(group)
                changed += 1
        return changed

    def fail_groups(self, leases: Sequence[Lease], reason: str) -> None:
        """Fails groups without their prompt or payload, unless they have been used."""
        for group_id, lease in leases:
            group = self.groups.get(group_id)
            if group is not None and group.lease == lease and group.state is not GroupState.CONSUMED:
                self._end_group(group, Fate.FAILED, reason)

    def nack(self, incarnation: int, leases: Sequence[Lease], disposition: str, reason: str) -> int:
        """Ends leases: back to ready (`release`), filtered (`filter`), or failed (`fail`)."""
        self._fence(incarnation)
        changed = 0
        for group_id, lease in leases:
            group = self.groups.get(group_id)
            if group is None or group.state is not GroupState.LEASED or group.lease != lease:
                continue
            if disposition == "release":
                self._make_ready(group)
            else:
                self._end_group(group, Fate.FILTERED if disposition == "filter" else Fate.FAILED, reason)
            changed += 1
        return changed

    def commit(self, incarnation: int, version: int) -> int:
        """Marks uses below `version` as durable."""
        self._fence(incarnation)
        if self.rules.bounded:
            self.committed = max(self.committed, version)
        used = [g for g in self.groups.values() if g.state is GroupState.CONSUMED and g.uses[-1] < version]
        for group in used:
            self._finish(group, Fate.TRAINED, "committed")
        return len(used)

    def set_policy(self, incarnation: int, version: int) -> None:
        """Records that weights of this version can be fetched."""
        self._fence(incarnation)
        if self.rules.bounded:
            self.u = max(self.u, version)

    def resume(self, member: str, call: int, k: int) -> ResumeAnswer:
        """The next incarnation starts from version k. A copy of a call changes nothing.

        Raises:
            Outdated: the copy is of an earlier attempt of the member.
        """
        if (answer := self.resumes.previous_answer(member, call, k)) is not None:
            return answer
        if self.suspect:
            raise Suspect
        done = self.take_over(k) if self.rules.bounded else self.end_rounds(k)
        return self.resumes.record(member, call, k, (self.lineage.incarnation, *done, self.seeded))

    def take_over(self, k: int) -> tuple[int, int, int]:
        """Makes the next incarnation, whatever is known of the one before."""
        self._begin_incarnation(k)
        self.u = k
        self.progress += 1
        self.streams.discard(LEARNER)
        self.holders.pop(LEARNER, None)
        trained = returned = evicted = 0
        hopeless: list[tuple[int, str]] = []
        for group in list(self.groups.values()):
            kept, used = kept_uses(group.uses, k), group.uses[-1] if group.uses else 0
            self.counts["uses"] -= len(group.uses) - len(kept)
            group.uses = kept
            if group.state is GroupState.LEASED:
                self._make_ready(group)
            elif group.state is not GroupState.CONSUMED:
                self._update_deadline(group)
            elif group.payload_lost:
                # Where uses are left it stays until the commit: further ones may be said of it.
                if not kept:
                    hopeless.append((used, group.group_id))
            elif kept and (self._deadline(group) < k or len(kept) >= self.rules.max_reuse):
                self._finish(group, Fate.TRAINED, "committed")
                trained += 1
            elif self._deadline(group) < k:
                self._finish(group, Fate.EVICTED_STALE, "resumed", requeue=True)
                evicted += 1
            else:
                self._make_ready(group)
                returned += 1
        for _, group_id in sorted(hopeless):
            self.used_ahead.discard(self.groups[group_id].task.ordinal)
            self._finish(self.groups[group_id], Fate.FAILED, "payload_lost")
        return trained, returned, evicted

    def end_rounds(self, k: int) -> tuple[int, int, int]:
        """Takes over a table without a bound: all its groups belong to versions of the old learner, and end."""
        self._begin_incarnation(k)
        self.withdraw()
        self._end_all(GroupState.CONSUMED)
        return 0, 0, 0

    def _begin_incarnation(self, k: int) -> None:
        incarnation = self.lineage.incarnation + 1
        self.lineage = self.lineage.with_takeover(incarnation, k)
        self.committed = k

    def _update_deadline(self, group: Group) -> None:
        """Updates a deadline after a takeover: tokens of discarded versions have grown older."""
        group.deadline = self._deadline(group)
        if group.state is GroupState.READY and self.rules.order is Order.FRESHEST:
            group.order = freshest_key(group.seal, group.deadline)

    # ------------------------------------------------------------------------------------------- lost state

    def mark_suspect(self, now: int) -> None:
        """Marks acknowledged state as maybe lost. No two doubts have the same number."""
        self.doubt = max(now, self.doubt + 1)

    def clear_suspect(self, now: int, version: int) -> None:
        """Ends the doubt once all uses are known again; nothing of the lost time comes again.

        Args:
            now: ms.
            version: in force.
        """
        self.doubt = 0
        self.u = max(self.u, version)
        self.skip_ids(to=self._seq + ID_GAP_AFTER_LOSS)
        self._leases = max(self._leases + ID_GAP_AFTER_LOSS, now)
        self._losses += 1

    def add_recorded_use(self, group: Group, version: int) -> None:
        """Adds a use that is asserted; the group is used no further where its payload is incomplete."""
        group.uses = sorted([*group.uses, version])
        self.counts["uses"] += 1
        if group.state is GroupState.CONSUMED:
            return
        if group.state is GroupState.GENERATING:
            group.payload_lost = True
            if not all(group.done):
                self._cancel(group)
        elif may_be_used_again(group.uses, group.deadline, self.rules.max_reuse):
            self._make_ready(group)
            return
        group.state = GroupState.CONSUMED
        group.holder = group.lease = ""
        group.orphan = False

    def skip_ids(self, *, to: int) -> None:
        """Numbers a group; later ones get higher numbers."""
        self._seq = max(self._seq, to)

    # ------------------------------------------------------------------------------------------------- upkeep

    def evict(self) -> int:
        """Ends groups that cannot train within the bound any more, ready or being generated; prompts are refilled."""
        hopeless = [
            g
            for g in self.groups.values()
            if g.state in (GroupState.GENERATING, GroupState.READY) and g.deadline < self.u
        ]
        if self.suspect or not self.rules.bounded:
            return 0
        for group in hopeless:
            if group.uses:
                self._retire(group)
                continue
            reason = "over_bound" if group.state is GroupState.READY else "hopeless"
            self._finish(group, Fate.EVICTED_STALE, reason, requeue=True)
        return sum(not group.uses for group in hopeless)

    def expire(self, now: int) -> tuple[int, int]:
        """Ends leases that ran out: (generating, leased)."""
        ended = returned = 0
        for _, holder in sorted((until, h) for h, until in self.holders.items() if until <= now):
            for group in self.groups_held_by(holder):
                returned += group.state is GroupState.LEASED
                ended += group.state is not GroupState.LEASED
                self._end_lease(group, 1)
            del self.holders[holder]
        return ended, returned
