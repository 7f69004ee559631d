"""State of one table of the off-policy contract: its counters, and the transitions that its commands share.

Invariants (checked by `check`): every group is in exactly one state; admitted = fates + live; seeded tasks = pending
+ withdrawn + first admissions.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import replace

from rollmesh.buffer.policy.rules import NO_BOUND, Order, TableRules
from rollmesh.buffer.reference_model.cancellations import Cancellations
from rollmesh.buffer.reference_model.dead_letters import DeadLetters
from rollmesh.buffer.reference_model.drafts import Draft
from rollmesh.buffer.reference_model.group_order import draw_key, freshest_key
from rollmesh.buffer.reference_model.group_states import Fate, Group, GroupState, Task, length_class
from rollmesh.buffer.reference_model.resume_answers import ResumeAnswers
from rollmesh.buffer.reference_model.reuse import spent
from rollmesh.mesh.trajectory.lineage import Lineage

# The secret of the run that it is compared with.
LEASE_SECRET = "secret"  # noqa: S105  of a test


class Fenced(Exception):  # noqa: N818  an answer, not a failure of the machine
    """A refusal: the caller acts under an incarnation that is over."""


class Suspect(Exception):  # noqa: N818  an answer, not a failure of the machine
    """A refusal: acknowledged state may be lost, and the learner must report its uses again."""


class TableState:
    """The state of one table.

    Args:
        name: prefix of group ids.
        rules: the table's rules.
    """

    def __init__(self, name: str, rules: TableRules) -> None:
        self.name = name
        self.rules = rules
        self.lineage = Lineage()
        self.committed = 0
        self.u = 0
        self.groups: dict[str, Group] = {}
        self.pending: list[Task] = []
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.holders: dict[str, int] = {}
        self.streams: set[str] = set()
        self.resumes = ResumeAnswers()
        self.cancels = Cancellations()
        self.drafts: defaultdict[str, dict[int, Draft]] = defaultdict(dict)
        self.granted_drafts: dict[str, list[int]] = {}
        self.dead_letters = DeadLetters(rules.failed_kept)
        self.evicted_tokens: Counter[int] = Counter()
        self.seeded = 0
        self.seed_call = (0, 0)
        self.doubt = 0
        """The number of the doubt whether acknowledged state is lost; 0 without a doubt."""
        self.used_ahead: set[int] = set()
        self.end_of_data = False
        self._seq = self._leases = self._seals = self._losses = 0
        self._race = 0.0
        self.progress = 0
        """Number of times that a group has come nearer to its end; changes that can be undone do not count."""

    def _new_lease(self, kind: str) -> str:
        self._leases += 1
        digest = hashlib.sha1(f"{LEASE_SECRET}{self.name}{self._leases}".encode(), usedforsecurity=False).hexdigest()
        return f"{kind}{self._leases}-{digest[:16]}"

    # ------------------------------------------------------------------------------------------- counters

    @property
    def suspect(self) -> bool:
        return self.doubt > 0

    def count(self, state: GroupState) -> int:
        return sum(group.state is state for group in self.groups.values())

    @property
    def demand(self) -> int:
        """Uses that the unclaimed groups demand, as the gate counts them."""
        per_group = self.rules.samples_per_insert
        return sum(
            per_group - spent(g.uses, per_group) for g in self.groups.values() if g.state is not GroupState.CONSUMED
        )

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups.values())

    @property
    def checkpoint_wanted(self) -> bool:
        """True if the groups that wait for a commit hold more than half of the byte budget."""
        consumed = sum(group.bytes for group in self.groups.values() if group.state is GroupState.CONSUMED)
        return consumed * 2 > self.rules.max_bytes

    @property
    def reserved(self) -> int:
        return sum(g.task.reserve for g in self.groups.values() if g.state is GroupState.GENERATING)

    def check(self) -> None:
        """The conservation laws.

        Raises:
            AssertionError: one is broken.
        """
        fates = sum(self.counts[fate] for fate in Fate)
        assert self.counts["admitted"] == fates + len(self.groups)
        tasks = len(self.pending) + self.counts["withdrawn"] + self.counts["admitted"]
        assert self.counts["seeded_tasks"] == tasks

    # ----------------------------------------------------------------------------------------- transitions

    def _fence(self, incarnation: int) -> None:
        if incarnation < self.lineage.incarnation:
            raise Fenced
        if self.suspect or incarnation > self.lineage.incarnation:
            raise Suspect

    def _deadline(self, group: Group) -> int:
        if not self.rules.bounded:
            return NO_BOUND
        oldest = group.ranges.oldest(self.lineage)
        if group.state is GroupState.GENERATING or oldest is None:
            granted = self.lineage.effective(group.grant)
            oldest = granted if oldest is None else min(oldest, granted)
        return oldest + self.rules.max_staleness

    def _finish(self, group: Group, fate: Fate, reason: str, *, requeue: bool = False) -> None:
        if group.state is GroupState.GENERATING and not all(group.done):
            self._cancel(group)
        drafts = self.drafts.pop(group.group_id, {})
        if fate is Fate.EVICTED_STALE:
            self.evicted_tokens[length_class(group.tokens + sum(d.tokens for d in drafts.values()))] += 1
        if fate is Fate.FAILED:
            self.dead_letters.add(group, reason)
        del self.groups[group.group_id]
        self.counts[fate] += 1
        self.progress += 1
        self.reasons[f"{fate}/{reason}"] += 1
        refills = group.task.refills + 1
        if requeue and refills <= self.rules.max_attempts:
            self.pending.append(replace(group.task, parent=group.group_id, refills=refills))
            self.counts["seeded_tasks"] += 1

    def _make_ready(self, group: Group) -> None:
        group.state = GroupState.READY
        group.holder = group.lease = ""
        group.orphan = False
        group.deadline = self._deadline(group)
        if self.rules.order is Order.FRESHEST:
            group.order = freshest_key(group.seal, group.deadline)
        elif self.rules.order is Order.PRIORITY:
            self._draw_key(group)

    def _draw_key(self, group: Group) -> None:
        group.draws += 1
        group.order = draw_key(group.group_id, group.draws, self.rules.seed, group.weight, self._race)

    def _retire(self, group: Group) -> None:
        """Retires a used group, which may not be used again: consumed until its last use is committed."""
        if group.uses[-1] < self.committed:
            self._finish(group, Fate.TRAINED, "committed")
            return
        group.state = GroupState.CONSUMED
        group.holder = group.lease = ""

    def _end_group(self, group: Group, fate: Fate, reason: str) -> None:
        """Ends a group that will not be trained (again)."""
        if group.uses and group.state is not GroupState.CONSUMED:
            self._retire(group)
        else:
            self._finish(group, fate, reason)

    def _cancel(self, group: Group) -> None:
        self.counts["cancelled"] += self.cancels.add(group)

    def _release_lease(self, group: Group, lost: int) -> None:
        if group.lost + lost >= self.rules.max_attempts:
            self._finish(group, Fate.FAILED, "attempts_exhausted")
            return
        group.lost += lost
        if group.holder:
            group.previous_holder = group.holder if lost else ""
        group.holder = ""
        group.orphan = True

    def _end_lease(self, group: Group, lost: int) -> None:
        """Ends a lease that its holder has lost or forgotten."""
        if group.state is GroupState.LEASED:
            self._make_ready(group)
        else:
            self._release_lease(group, lost)

    def groups_held_by(self, holder: str) -> list[Group]:
        """Groups leased to this holder."""
        return [group for group in self.groups.values() if group.holder == holder]
