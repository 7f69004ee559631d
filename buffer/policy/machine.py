"""The off-policy contract of one table as a pure state machine with an injected clock.

This is the reference for the Lua verbs: hypothesis replays the same commands here and on a real Redis, and states,
answers and ledger must agree after every step. It does no I/O and reads no clock of its own; `now` is in ms.

Invariants (checked by `check`): every group is in exactly one state; admitted = fates + live; seeded tasks = pending
+ withdrawn + first admissions; a group that is generating or ready trains by its deadline or is evicted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from buffer.policy.cancels import Cancels
from buffer.policy.dead_letter import DeadLetter
from buffer.policy.drafts import Draft, hand_out
from buffer.policy.lengths import length_class
from buffer.policy.lineage import Lineage, VersionRanges
from buffer.policy.order import freshest_key
from buffer.policy.reassertion import LEAP, Assertion
from buffer.policy.reuse import draw_key, kept_uses, may_be_used_again, spent
from buffer.policy.rules import NO_BOUND, Order, TableRules
from buffer.policy.states import Fate, Group, State, Task
from mesh.versions import PolicyVersion

LEARNER = "learner"
# Different reasons of unscored members that a group keeps.
MAX_CAUSES = 8


class Fenced(Exception):  # noqa: N818  an answer, not a failure of the machine
    """The caller acts under an incarnation that is over."""


class Suspect(Exception):  # noqa: N818  an answer, not a failure of the machine
    """Acknowledged state may be lost: the learner must say again what it has used."""


class TableMachine:
    """One table.

    Args:
        name: prefix of group ids.
        rules: the table's rules.
    """

    def __init__(self, name: str, rules: TableRules) -> None:
        self.name = name
        self.rules = rules
        self.lineage = Lineage(0, {})
        self.committed = 0
        self.u = 0
        self.groups: dict[str, Group] = {}
        self.pending: list[Task] = []
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.holders: dict[str, int] = {}
        self.streams: set[str] = set()
        self.cancels = Cancels()
        self.drafts: defaultdict[str, dict[int, Draft]] = defaultdict(dict)
        self.handed: dict[str, list[int]] = {}
        self.dead = DeadLetter(rules.failed_kept)
        self.evicted_tokens: Counter[int] = Counter()
        self.seeded = 0
        self.suspect = False
        self.used_ahead: set[int] = set()
        self.end_of_data = False
        self._seq = self._leases = self._seals = 0
        self._race = 0.0

    # -------------------------------------------------------------------------------------------- figures

    def count(self, state: State) -> int:
        return sum(group.state is state for group in self.groups.values())

    @property
    def live(self) -> int:
        """Unclaimed live groups (L)."""
        return sum(group.state is not State.CONSUMED for group in self.groups.values())

    @property
    def demand(self) -> int:
        """Uses that the unclaimed groups demand: what the gate counts."""
        per_group = self.rules.samples_per_insert
        return sum(per_group - spent(g.uses, per_group) for g in self.groups.values() if g.state is not State.CONSUMED)

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups.values())

    @property
    def checkpoint_wanted(self) -> bool:
        """What waits for a commit holds more than half of the byte budget."""
        consumed = sum(group.bytes for group in self.groups.values() if group.state is State.CONSUMED)
        return consumed * 2 > self.rules.max_bytes

    @property
    def reserved(self) -> int:
        return sum(g.task.reserve for g in self.groups.values() if g.state is State.GENERATING)

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
        if group.state is State.GENERATING or oldest is None:
            granted = self.lineage.effective(group.grant)
            oldest = granted if oldest is None else min(oldest, granted)
        return oldest + self.rules.max_staleness

    def _finish(self, group: Group, fate: Fate, reason: str, *, requeue: bool = False) -> None:
        if group.state is State.GENERATING and not all(group.done):
            self._cancel(group)
        drafts = self.drafts.pop(group.group_id, {})
        if fate is Fate.EVICTED_STALE:
            self.evicted_tokens[length_class(group.tokens + sum(d.tokens for d in drafts.values()))] += 1
        if fate is Fate.FAILED:
            self.dead.bury(group, reason)
        del self.groups[group.group_id]
        self.counts[fate] += 1
        self.reasons[f"{fate}/{reason}"] += 1
        refills = group.task.refills + 1
        if requeue and refills <= self.rules.max_attempts:
            self.pending.append(replace(group.task, parent=group.group_id, refills=refills))
            self.counts["seeded_tasks"] += 1

    def _make_ready(self, group: Group) -> None:
        group.state = State.READY
        group.holder = group.lease = ""
        group.orphan = False
        group.deadline = self._deadline(group)
        if self.rules.order is Order.FRESHEST:
            group.order = freshest_key(group.seal, group.deadline)
        elif self.rules.order is Order.PRIORITY:
            self._enter_race(group)

    def _enter_race(self, group: Group) -> None:
        group.draws += 1
        group.order = draw_key(group.group_id, group.draws, self.rules.seed, group.weight, self._race)

    def _retire(self, group: Group) -> None:
        """It has been used and may not be used again: consumed until its last use is committed."""
        if group.uses[-1] < self.committed:
            self._finish(group, Fate.TRAINED, "committed")
            return
        group.state = State.CONSUMED
        group.holder = group.lease = ""

    def _give_up(self, group: Group, fate: Fate, reason: str) -> None:
        """Ends a group that nobody will train (again)."""
        if group.uses and group.state is not State.CONSUMED:
            self._retire(group)
        else:
            self._finish(group, fate, reason)

    def _cancel(self, group: Group) -> None:
        self.counts["cancelled"] += self.cancels.note(group)

    def _orphan(self, group: Group, lost: int) -> None:
        if group.lost + lost >= self.rules.max_attempts:
            self._finish(group, Fate.FAILED, "attempts_exhausted")
            return
        group.lost += lost
        if group.holder:
            group.former = group.holder if lost else ""
        group.holder = ""
        group.orphan = True

    def held(self, holder: str) -> list[Group]:
        """Groups whose lease this holder has."""
        return [group for group in self.groups.values() if group.holder == holder]

    # ----------------------------------------------------------------------------------------------- seed

    def seed(
        self, incarnation: int, tasks: Iterable[Task], *, end_of_data: bool = False, withdraw: bool = False
    ) -> tuple[int, int]:
        """Adds tasks; returns (added, withdrawn)."""
        self._fence(incarnation)
        withdrawn = self.withdraw() if withdraw else 0
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
        if end_of_data or added:
            self.end_of_data = end_of_data
        return added, withdrawn

    def withdraw(self) -> int:
        """Takes pending tasks back; without a bound also ends the unclaimed groups."""
        withdrawn = len(self.pending)
        self.pending.clear()
        self.counts["withdrawn"] += withdrawn
        if not self.rules.bounded:
            for group in [g for g in self.groups.values() if g.state is not State.CONSUMED]:
                self._finish(group, Fate.FAILED, "withdrawn")
        return withdrawn

    def redrive(self, group_ids: Sequence[str]) -> tuple[int, list[str]]:
        """Queues prompts of failed groups again: (how many, groups whose prompt is not kept any more)."""
        tasks, unknown = self.dead.redrive(group_ids)
        self.pending += tasks
        self.counts["seeded_tasks"] += len(tasks)
        self.counts["redriven"] += len(tasks)
        return len(tasks), unknown

    # --------------------------------------------------------------------------------------------- generators

    def admit(self, member: str, serving: PolicyVersion, wanted: int, live_limit: int, now: int) -> list[Group]:
        """Orphans first (they skip the gate, not the bound), then pending tasks while the gate is open."""
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
                    granted.append(self._granted(group, member))
                else:
                    group.grant = before
        for pin in (str(serving), ""):
            while len(granted) < wanted:
                task = min((t for t in self.pending if t.pin == pin), key=_pending_order, default=None)
                if task is None or not self._open(live_limit, task):
                    break
                self.pending.remove(task)
                granted.append(self._granted(self._admitted(task, serving), member))
        if granted:
            self.holders.setdefault(member, now + self.rules.lease_ms)
        return granted

    def _open(self, live_limit: int, task: Task) -> bool:
        if not self.rules.bounded:
            return True
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
        self._leases += 1
        group.lease = f"a{self._leases}"
        group.attempt += 1
        group.holder, group.former, group.orphan = member, "", False
        self._hand_out(group)
        return group

    def _hand_out(self, group: Group) -> None:
        self.handed[group.group_id] = hand_out(group, self.drafts[group.group_id], self._deadline, self.u)

    def leave(self, member: str) -> None:
        """A generator leaves in order: its leases end at once."""
        self.cancels.leave(member)
        for group in self.held(member):
            self._orphan(group, 0)
        self.holders.pop(member, None)

    def attach(self, holder: str, now: int) -> list[Group]:
        """The holder's stream is open (again): full term for what it has."""
        self.streams.add(holder)
        held = self.held(holder)
        for group in held:
            if group.state is State.GENERATING:
                self._hand_out(group)
        if held:
            self.holders[holder] = now + self.rules.lease_ms
        return held

    def detach(self, holder: str, now: int) -> None:
        """The holder's stream broke: the reconnect grace is left."""
        if holder in self.streams:
            self.streams.remove(holder)
            if holder in self.holders:
                self.holders[holder] = min(self.holders[holder], now + self.rules.grace_ms)

    def beat(self, holder: str, now: int) -> None:
        """The holder lives."""
        if holder in self.holders and holder in self.streams:
            self.holders[holder] = now + self.rules.lease_ms

    def release(self, member: str, leases: Sequence[tuple[str, str]]) -> int:
        """Gives up groups being generated; this costs no attempt."""
        released = 0
        for group_id, lease in leases:
            group = self.groups.get(group_id)
            if group and group.state is State.GENERATING and group.holder == member and group.lease == lease:
                self._orphan(group, 0)
                released += 1
        return released

    def _may_write(self, group: Group, lease: str, attempt: int) -> bool:
        return group.attempt == attempt and (group.state is not State.GENERATING or group.lease == lease)

    def write_draft(
        self, group_id: str, lease: str, attempt: int, member: int, *, tokens: int, ranges: VersionRanges
    ) -> str:
        """What was sampled so far of a member: stored / duplicate / superseded / rejected. Counts nowhere."""
        group = self.groups.get(group_id)
        if group is None:
            return "superseded"
        if member >= group.task.n:
            return "rejected"
        if not self._may_write(group, lease, attempt):
            return "superseded"
        known = self.drafts[group_id].get(member)
        if group.done[member] or (known and not known.is_older_than(attempt, tokens)):
            return "duplicate"
        self.drafts[group_id][member] = Draft(attempt, tokens, ranges)
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
        """One member's outcome: (stored / duplicate / superseded / rejected, whether it sealed the group)."""
        group = self.groups.get(group_id)
        if group is None:
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
        self.drafts[group_id].pop(member, None)
        if not scored:
            self._note_cause(group, reason)
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

    def _note_cause(self, group: Group, reason: str) -> None:
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

    # ------------------------------------------------------------------------------------------------ learner

    def sample(self, incarnation: int, version: int, group_ids: Sequence[str], now: int) -> list[Group]:
        """Leases proposed groups for one version; state, bound and quota decide again."""
        self._fence(incarnation)
        room = len(group_ids)
        if self.rules.bounded:
            taken = sum(g.state is State.LEASED and g.for_version == version for g in self.groups.values())
            room = self.rules.groups_per_step - taken if version >= self.u else 0
        leased: list[Group] = []
        for group_id in group_ids:
            group = self.groups.get(group_id)
            if len(leased) < room and group and group.state is State.READY and group.deadline >= version:
                self._leases += 1
                self._draw(group)
                group.state, group.holder, group.lease = State.LEASED, LEARNER, f"s{self._leases}"
                group.for_version = version
                leased.append(group)
        if leased:
            self.holders.setdefault(LEARNER, now + self.rules.lease_ms)
        return leased

    def claim(self, incarnation: int, version: int, leases: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """All or none become consumed; returns the refusals."""
        self._fence(incarnation)
        refused, repeated = [], bool(leases)
        for group_id, lease in leases:
            why = self._refusal(group_id, lease, version)
            if why:
                refused.append((group_id, why))
            group = self.groups.get(group_id)
            repeated = repeated and group is not None and bool(group.uses) and group.claimed == lease
        if refused or repeated:
            return refused
        if self.rules.bounded and version < self.u:
            return [(group_id, "version_claimed") for group_id, _ in leases]
        for group_id, _ in leases:
            self._use(self.groups[group_id], version)
        if self.rules.bounded:
            self.u = version + 1
        return []

    def _refusal(self, group_id: str, lease: str, version: int) -> str:
        group = self.groups.get(group_id)
        if group is not None and group.uses and group.claimed == lease:
            return "" if group.uses[-1] == version else f"claimed_at_{group.uses[-1]}"
        if group is None or group.lease != lease or group.state is not State.LEASED:
            return "lease_lost"
        return "over_bound" if group.deadline < version else ""

    def _use(self, group: Group, version: int) -> None:
        group.uses.append(version)
        group.claimed = group.lease
        self.counts["uses"] += 1
        if may_be_used_again(group.uses, group.deadline, self.rules.max_reuse):
            self._make_ready(group)
        else:
            group.state, group.holder = State.CONSUMED, ""

    def _draw(self, group: Group) -> None:
        if self.rules.order is Order.PRIORITY:
            ready = (g.weight for g in self.groups.values() if g.state is State.READY)
            group.chance = group.weight / sum(ready)
            self._race = max(self._race, group.order)

    def set_priorities(self, incarnation: int, priorities: Iterable[tuple[str, float, int]]) -> int:
        """Changes (group id, priority, weight) of live groups; returns how many."""
        self._fence(incarnation)
        changed = 0
        for group_id, priority, weight in priorities:
            group = self.groups.get(group_id)
            if group is not None:
                group.priority, group.weight = priority, weight
                if group.state is State.READY and self.rules.order is Order.PRIORITY:
                    self._enter_race(group)
                changed += 1
        return changed

    def nack(self, incarnation: int, leases: Sequence[tuple[str, str]], disposition: str, reason: str) -> int:
        """Back to ready (`release`), or filtered (`filter`), or failed (`fail`)."""
        self._fence(incarnation)
        changed = 0
        for group_id, lease in leases:
            group = self.groups.get(group_id)
            if group is None or group.state is not State.LEASED or group.lease != lease:
                continue
            if disposition == "release":
                self._make_ready(group)
            else:
                self._give_up(group, Fate.FILTERED if disposition == "filter" else Fate.FAILED, reason)
            changed += 1
        return changed

    def commit(self, incarnation: int, version: int) -> int:
        """Uses below `version` are durable."""
        self._fence(incarnation)
        if self.rules.bounded:
            self.committed = max(self.committed, version)
        used = [g for g in self.groups.values() if g.state is State.CONSUMED and g.uses[-1] < version]
        for group in used:
            self._finish(group, Fate.TRAINED, "committed")
        return len(used)

    def set_policy(self, incarnation: int, version: int) -> None:
        """Weights of this version can be fetched."""
        self._fence(incarnation)
        self.u = max(self.u, version)

    def resume(self, k: int) -> tuple[int, int, int]:
        """The next incarnation starts from version k: (trained, returned, evicted)."""
        if self.suspect:
            raise Suspect
        return self.go_on(k)

    def go_on(self, k: int) -> tuple[int, int, int]:
        """Makes the next incarnation, whatever is known of the one before."""
        incarnation = self.lineage.incarnation + 1
        self.lineage = Lineage(incarnation, {**self.lineage.resumed_at, incarnation: k})
        self.u = self.committed = k
        self.streams.discard(LEARNER)
        trained = returned = evicted = 0
        for group in list(self.groups.values()):
            kept = kept_uses(group.uses, k)
            self.counts["uses"] -= len(group.uses) - len(kept)
            group.uses = kept
            if group.state is State.LEASED:
                self._make_ready(group)
            elif group.state is not State.CONSUMED:
                self._recount(group)
            elif kept and (self._deadline(group) < k or group.hollow or len(kept) >= self.rules.max_reuse):
                self._finish(group, Fate.TRAINED, "committed")
                trained += 1
            elif group.hollow:
                self._finish(group, Fate.FAILED, "payload_lost")
            elif self._deadline(group) < k:
                self._finish(group, Fate.EVICTED_STALE, "resumed", requeue=True)
                evicted += 1
            else:
                self._make_ready(group)
                returned += 1
        return trained, returned, evicted

    def _recount(self, group: Group) -> None:
        """Tokens of versions that have just been discarded have grown older."""
        group.deadline = self._deadline(group)
        if group.state is State.READY and self.rules.order is Order.FRESHEST:
            group.order = freshest_key(group.seal, group.deadline)

    # ------------------------------------------------------------------------------------------- lost state

    def reassert(self, assertion: Assertion, *, more: bool) -> tuple[int, int]:
        """The learner says again what it has used: (groups corrected, groups that were unknown)."""
        if not assertion.is_believed(self):
            raise Fenced
        found = assertion.apply(self)
        if not more:
            assertion.catch_up(self, None)
            self.suspect = False
            self.u = max(self.u, assertion.version)
            self.leap(to=self._seq + LEAP)
            self._leases += LEAP
        return found

    def use_again(self, group: Group, version: int) -> None:
        """Adds a use that is asserted; the group is used no further where its payload is incomplete."""
        group.uses = sorted([*group.uses, version])
        self.counts["uses"] += 1
        if group.state is State.CONSUMED:
            return
        if group.state is State.GENERATING:
            group.hollow = True
            if not all(group.done):
                self._cancel(group)
        elif may_be_used_again(group.uses, group.deadline, self.rules.max_reuse):
            self._make_ready(group)
            return
        group.state = State.CONSUMED
        group.holder = group.lease = ""
        group.orphan = False

    def leap(self, *, to: int) -> None:
        """Later groups are numbered behind this."""
        self._seq = max(self._seq, to)

    # ------------------------------------------------------------------------------------------------- upkeep

    def evict(self) -> int:
        """Ends what cannot train within the bound any more, ready or still being generated; prompts are refilled."""
        hopeless = [
            g for g in self.groups.values() if g.state in (State.GENERATING, State.READY) and g.deadline < self.u
        ]
        if self.suspect or not self.rules.bounded:
            return 0
        for group in hopeless:
            if group.uses:
                self._retire(group)
                continue
            reason = "over_bound" if group.state is State.READY else "hopeless"
            self._finish(group, Fate.EVICTED_STALE, reason, requeue=True)
        return sum(not group.uses for group in hopeless)

    def expire(self, now: int) -> tuple[int, int]:
        """Leases that ran out end: (generating, leased)."""
        ended = returned = 0
        for holder in [h for h, until in self.holders.items() if until <= now]:
            for group in self.held(holder):
                if group.state is State.LEASED:
                    self._make_ready(group)
                    returned += 1
                else:
                    self._orphan(group, 1)
                    ended += 1
            del self.holders[holder]
        return ended, returned


def _pending_order(task: Task) -> tuple[int, str]:
    return (task.ordinal, task.parent)
