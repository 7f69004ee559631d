"""The pure state machine and the Lua verbs on a real Redis get the same commands and must agree after each.

Compared are the answers, and all that `tests.buffer.comparison` reads.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgpack
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
)

from rollmesh.buffer.policy import gate
from rollmesh.buffer.policy.draw_weights import weight_of
from rollmesh.buffer.policy.rules import Order, TableRules
from rollmesh.buffer.policy.version_ranges import VersionRanges
from rollmesh.buffer.protocol.leases import LEARNER
from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.reference_model.group_states import Fate, Group, GroupState, Task
from rollmesh.buffer.reference_model.table_machine import TableMachine
from rollmesh.buffer.reference_model.table_state import LEASE_SECRET
from rollmesh.buffer.store.drafts import parse_draft_refs
from rollmesh.buffer.store.generator_commands import packed
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.unowned_values import GroupOwnership
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.buffer.comparison import MEMBERS
from tests.buffer.fences import FencedMachines
from tests.buffer.groups_as_stored import DIGEST, PIECES, place_of
from tests.buffer.telling import index

# Redis TIME replaced by a key that the test moves.
CLOCK = "local function now_ms() return tonumber(redis.call('GET', KEYS[1] .. ':test_clock')) end\n"
# The fate of a write, and whether it has sealed its group.
WRITTEN = {
    b"0": ("stored", True),
    b"1": ("stored", False),
    b"2": ("duplicate", False),
    b"3": ("superseded", False),
    b"4": ("rejected", False),
}


def _refusals(answer: list[Any]) -> list[tuple[str, ...]]:
    return [tuple(part.decode() for part in refusal) for refusal in answer[3]]


class BothMachines(FencedMachines):
    """Drives both; `url` is set by the test. `BOUNDED` leaves out the table of evaluation."""

    url: ClassVar[str] = ""
    BOUNDED: ClassVar[bool] = False

    @initialize(
        staleness=st.integers(0, 2),
        order=st.sampled_from(Order),
        reuse=st.integers(1, 3),
        budget=st.sampled_from([1 << 30, 450]),
        bounded=st.sampled_from([True, True, False]),
    )
    def begin(self, staleness: int, order: Order, reuse: int, budget: int, bounded: bool = True) -> None:
        bounded = bounded or self.BOUNDED
        # Only tables of evaluations are unbounded, and these use a group once.
        reuse = min(reuse, staleness + 1 if bounded else 1)
        self.rules = TableRules(
            groups_per_step=2, max_staleness=staleness, bounded=bounded, order=order, max_reuse=reuse,
            samples_per_insert=max(1, reuse - budget % 2), seed=7, min_members=1, lease_ms=1000,
            grace_ms=200, max_bytes=budget, max_attempts=2, failed_kept=4,
        )  # fmt: skip
        self.loop = asyncio.new_event_loop()
        self.keys = Keys(uuid.uuid4().hex)
        self.redis = RedisAccess(self.url, self.keys.run, clock=CLOCK)
        self.table = "train" if bounded else "eval"
        self.machine = TableMachine(self.table, self.rules)
        self.begin_telling()
        self.now = 1_000_000
        self.progress, self.moved_ms = 0, 0
        self.version = 0
        self.old: list[tuple[str, str, int]] = []
        self.seen: set[str] = set()
        self.claimed: list[tuple[int, list[tuple[str, str]]]] = []
        self.call(self.redis.client.set(f"{self.keys.run}:test_clock", self.now))
        self.call(self.redis.client.hset(f"{self.keys.run}:generations", mapping=dict.fromkeys(MEMBERS, 1)))
        # The table `train` leads the run, also where the other one is looked at.
        of_tables = {"train": replace(self.rules, bounded=True), self.table: self.rules}
        rules = json.dumps({name: rules.to_fields() for name, rules in {"eval": self.rules, **of_tables}.items()})
        self.verb("bootstrap", "", "front", 1000, 1, "{}", rules, LEASE_SECRET)
        self.verb("expire", self.table, 100, 10_000_000)
        self.resume(0)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.call(self._forget_run())
            self.call(self.redis.close())
            self.loop.close()

    async def _forget_run(self) -> None:
        """Leaves nothing that later runs would search through."""
        if keys := [key async for key in self.redis.scan(f"*{self.keys.run_name}*")]:
            await self.redis.batch([("UNLINK", *keys)])

    def some(self, state: GroupState | None, at: int) -> Group | None:
        groups = [g for g in self.machine.groups.values() if state is None or g.state is state]
        return groups[at % len(groups)] if groups else None

    # ---------------------------------------------------------------------------------------------- commands

    @rule(ms=st.sampled_from([1, 150, 400, 1100]))
    def time_passes(self, ms: int) -> None:
        self._record_progress()
        self.now += ms
        self.call(self.redis.client.set(f"{self.keys.run}:test_clock", self.now))

    def _record_progress(self) -> None:
        """The machine knows whether there was any since the clock last moved, the test when that was."""
        if self.machine.progress > self.progress:
            self.progress, self.moved_ms = self.machine.progress, self.now

    @rule(
        count=st.integers(0, 4), again=st.booleans(), end=st.booleans(), withdraw=st.sampled_from([False] * 7 + [True])
    )
    def seed(self, count: int, again: bool, end: bool, withdraw: bool) -> None:
        first = self.machine.seeded + (0 if again else 1)
        pin = "" if self.rules.bounded or count % 2 else f"{self.incarnation}:{self.version}"
        digest = f"{self.calls:016x}"
        tasks = [Task(o, 2, pin, 100, f"t{o}", digest=digest) for o in range(max(1, first), max(1, first) + count)]
        flat: list[Any] = []
        for t in tasks:
            flat += [t.ordinal, msgpack.packb([t.ordinal, t.n, t.pin, t.reserve, t.task_id, "", 0]), t.pin, t.digest]
        incarnation, call = self.incarnation, self.next_call()
        self.tell(
            "seed", self.table, incarnation, int(end), int(withdraw), call, *flat,
            read=lambda answer: (answer[2], answer[5]),
            to_machine=lambda: self.machine.seed(incarnation, tasks, end_of_data=end, withdraw=withdraw, call=call),
        )  # fmt: skip

    @rule(member=st.sampled_from(MEMBERS), behind=st.integers(0, 2), wanted=st.integers(1, 5))
    def admit(self, member: str, behind: int, wanted: int) -> None:
        serving = PolicyVersion(self.incarnation, max(0, self.version - behind))
        u, rules = self.machine.u, self.rules
        limit = gate.live_limit(u, serving.version, rules.groups_per_step, rules.max_staleness)
        answer = self.verb(
            "admit",
            self.table,
            member,
            self.generations[member],
            serving.incarnation,
            serving.version,
            wanted,
            u,
            limit,
            "",
        )
        drafts = sum(map(len, self.machine.drafts.values()))
        granted = self.machine.admit(member, serving, wanted, limit, self.now, evaluating=self._is_evaluating())
        self.seen |= {"draft dropped"} if drafts > sum(map(len, self.machine.drafts.values())) else set()
        assert [(g[0].decode(), g[1].decode(), g[2]) for g in answer[2]] == [
            (g.group_id, g.lease, g.attempt) for g in granted
        ]
        self._same_drafts(answer[2], granted)
        self.old += [(g.group_id, g.lease, g.attempt) for g in granted]

    def _is_evaluating(self) -> bool:
        packed = self.call(self.redis.client.hget(f"{self.keys.run}:eval", "counters"))
        return bool(packed) and any(
            msgpack.unpackb(packed)[name] for name in ("pending", "generating", "ready", "leased")
        )

    @rule(asked=st.booleans())
    def evaluate(self, asked: bool) -> None:
        """An evaluation begins, or is over."""
        if self.rules.bounded:
            call = self.next_call()
            task = [call, msgpack.packb([call, 1, "", 100, "held-out", "", 0]), "", f"{call:016x}"] if asked else []
            self.verb("seed", "eval", self.incarnation, 0, int(not asked), call, *task)

    def _same_drafts(self, answer: list[Any], groups: list[Group]) -> None:
        """Those handed out with grants."""
        machine = self.machine
        expected = {
            g.group_id: [(m, d.attempt, d.tokens, DIGEST) for m, d in machine.drafts[g.group_id].items() if m in handed]
            for g in groups
            for handed in [machine.granted_drafts[g.group_id]]
        }
        self.seen |= {"draft handed out"} if any(expected.values()) else set()
        assert {g[0].decode(): sorted(parse_draft_refs(g[6])) for g in answer} == {
            group_id: sorted(drafts) for group_id, drafts in expected.items()
        }

    @rule(count=st.integers(1, 6), member=st.sampled_from(MEMBERS))
    def fill(self, count: int, member: str) -> None:
        """Seeds and admits for the present version: gets groups going."""
        self.seed(count, False, False, False)
        self.admit(member, 0, count)

    @rule(at=index, age=st.integers(0, 2))
    def finish_group(self, at: int, age: int) -> None:
        group = self.some(GroupState.GENERATING, at)
        if group is not None:
            for member in range(group.task.n):
                self._write(group.group_id, group.lease, group.attempt, member, True, [age])

    @rule(at=index)
    def fail_group(self, at: int) -> None:
        group = self.some(GroupState.GENERATING, at)
        if group is not None:
            for member in range(group.task.n):
                self._write(group.group_id, group.lease, group.attempt, member, False, [0])

    @rule()
    def lose_holders(self) -> None:
        """Exactly one term passes: leases that begin now end in the last moment."""
        self.time_passes(self.rules.lease_ms)
        self.expire()

    @rule(count=st.integers(1, 3), publish=st.booleans(), ahead=st.sampled_from([0, 0, 0, -1, 1]))
    def train_batch(self, count: int, publish: bool, ahead: int = 0) -> None:
        self.sample(0, count)
        self.claim(ahead, False, 0)
        if publish:
            self.publish()

    @rule(
        at=index,
        member=st.integers(0, 2),
        scored=st.booleans(),
        ages=st.lists(st.integers(0, 3), min_size=1, max_size=2),
    )
    def write_current(self, at: int, member: int, scored: bool, ages: list[int]) -> None:
        group = self.some(None, at)
        if group is not None:
            self._write(group.group_id, group.lease, group.attempt, member % 3, scored, ages)

    @precondition(lambda self: self.old)
    @rule(at=index, member=st.integers(0, 1), ages=st.lists(st.integers(0, 3), min_size=1, max_size=2))
    def write_any(self, at: int, member: int, ages: list[int]) -> None:
        self._write(*self.old[at % len(self.old)], member, True, ages)

    @precondition(lambda self: self.machine.groups)
    @rule(
        at=index,
        member=st.integers(0, 2),
        tokens=st.integers(1, 9),
        ages=st.lists(st.integers(0, 3), min_size=1, max_size=2),
    )
    def draft_current(self, at: int, member: int, tokens: int, ages: list[int]) -> None:
        group = self.some(GroupState.GENERATING, at)
        if group is not None:
            self._draft(group.group_id, group.lease, group.attempt, member, tokens, ages)

    @precondition(lambda self: self.old)
    @rule(at=index, member=st.integers(0, 1), tokens=st.integers(1, 9))
    def draft_any(self, at: int, member: int, tokens: int) -> None:
        self._draft(*self.old[at % len(self.old)], member, tokens, [0])

    def _draft(self, gid: str, lease: str, attempt: int, member: int, tokens: int, ages: list[int]) -> None:
        ranges = VersionRanges.of(self._versions(ages))
        may_own = self._may_own(gid, f"{member}:d{attempt}-{tokens}-{DIGEST}")
        outcome = packed([gid, lease, str(attempt), str(ranges), str(member), f"-{DIGEST}", 10, tokens, b""])
        status, _ = self.tell(
            "write", self.table, outcome,
            what="draft",
            read=lambda answer: WRITTEN[answer[2]],
            to_machine=lambda: (
                self.machine.write_draft(gid, lease, attempt, member, tokens=tokens, ranges=ranges), False
            ),
        )  # fmt: skip
        assert may_own or status != "stored", "the sweep would have taken it away"
        self.seen.add(f"draft {status}")

    def _may_own(self, gid: str, name: str) -> bool:
        """True where the sweep of stored values leaves this one alone."""
        (reply,) = self.verb("value_owners", self.table, gid)[2]
        return bool(reply) and GroupOwnership.from_reply(reply).may_own(name)

    def _versions(self, ages: list[int]) -> list[PolicyVersion]:
        return [PolicyVersion(max(1, self.incarnation - age // 2), max(0, self.version - age)) for age in ages]

    @rule(member=st.sampled_from(MEMBERS), tell=st.booleans())
    def read_cancels(self, member: str, tell: bool) -> None:
        told = sorted(self.machine.cancels.read(member))[:1] if tell else []
        generation = self.generations[member]
        answer = self.verb(
            "read_cancellations", self.table, member, generation, 100, *(f"{gid} {lease}" for gid, lease in told)
        )
        assert {tuple(entry.decode().split()) for entry in answer[2]} == self.machine.cancels.read(member, told)

    @rule(at=index, count=st.integers(1, 3))
    def redrive(self, at: int, count: int) -> None:
        known = list(self.machine.dead_letters.notes)
        ids = [known[(at + i) % len(known)] if known else "train-0" for i in range(count)]
        self.tell(
            "redrive", self.table, *ids,
            read=lambda answer: (answer[2], [gid.decode() for gid in answer[3]]),
            to_machine=lambda: self.machine.redrive(ids),
        )  # fmt: skip

    @rule(member=st.sampled_from(MEMBERS))
    def leave_and_come_back(self, member: str) -> None:
        generation = self.generations[member]

        def leave() -> None:
            # From one that has gone nothing is answered.
            if generation == self.generations[member]:
                self.machine.leave(member)

        self.tell("leave", "", member, generation, 0, read=lambda _answer: None, to_machine=leave)
        self.agree()
        self.generations[member] += 1
        generations = f"{self.keys.run}:generations"
        self.call(self.redis.client.hset(generations, member, self.generations[member]))
        self.machine.cancels.join(member)

    def _write(self, gid: str, lease: str, attempt: int, member: int, scored: bool, ages: list[int]) -> None:
        ranges = VersionRanges.of(self._versions(ages)) if scored else VersionRanges()
        size = 50 if scored else 0
        tokens, reason = (5 + member, "") if scored else (0, f"reason {ages[0]}")
        place = place_of(member) if scored else ""
        may_own = self._may_own(gid, f"{member}:{attempt}:{DIGEST}{':1' if member in PIECES else ''}")
        (allowed,) = self.verb("member_state", self.table, gid, lease, attempt, member)[2:]
        outcome = packed([gid, lease, str(attempt), str(ranges), str(member), place, size, tokens or reason, b"meta"])
        status, _ = self.tell(
            "write", self.table, outcome,
            read=lambda answer: WRITTEN[answer[2]],
            to_machine=lambda: self.machine.write(
                gid, lease, attempt, member, scored=scored, size=size, ranges=ranges, tokens=tokens, reason=reason
            ),
        )  # fmt: skip
        assert may_own or status != "stored", "the sweep would have taken it away"
        assert WRITTEN[b"%d" % allowed][0] == status, "an upload is let in where its write will be"

    @rule(ahead=st.integers(-1, 1), count=st.integers(1, 3), stray=index)
    def sample(self, ahead: int, count: int, stray: int = 1) -> None:
        version = max(0, self.base + ahead)
        ready = sorted((g for g in self.machine.groups.values() if g.state is GroupState.READY), key=lambda g: g.order)
        ids = [g.group_id for g in ready[:count]]
        if stray % 3 == 0:  # a front with an old view proposes what is not ready any more
            ids[:0] = [other.group_id if (other := self.some(None, stray)) else "train-0"]
        answer = self.verb("sample", self.table, self.incarnation, version, "", *ids)
        leased = self.machine.sample(self.incarnation, version, ids, self.now)
        assert [(g[0].decode(), g[1].decode(), g[9], float(g[10]), float(g[11])) for g in answer[2]] == [
            (g.group_id, g.lease, len(g.uses) + 1, g.priority, g.chance) for g in leased
        ]
        if self.rules.order is Order.PRIORITY:
            assert all(0 < g.chance <= 1 for g in leased)

    @rule(ahead=st.sampled_from([0, 0, 0, -1, 1]), lost=st.sampled_from([False] * 5 + [True]), drop=st.integers(0, 1))
    def claim(self, ahead: int, lost: bool, drop: int) -> None:
        # Evaluation goes from version to version.
        version = max(0, self.base + (ahead if self.rules.bounded else max(0, ahead)))
        leases = [
            (g.group_id, "wrong" if lost else g.lease)
            for g in self.machine.groups.values()
            if g.state is GroupState.LEASED or (g.state is GroupState.CONSUMED and g.uses[-1] == version)
        ][drop:]
        if not leases:
            return
        if self._claim(version, leases):
            for group_id, _ in leases:
                oldest = self.machine.groups[group_id].ranges.oldest(self.machine.lineage)
                in_bound = oldest is None or version - oldest <= self.rules.max_staleness
                assert in_bound or not self.rules.bounded, "trained over the bound"
            self.claimed.append((version, leases))

    def _claim(self, version: int, leases: Sequence[tuple[str, str]]) -> bool:
        """True where they are claimed: all, and each of them once."""
        incarnation, before = self.incarnation, self.machine.counts["uses"]
        unused = {gid for gid, lease in leases if (g := self.machine.groups.get(gid)) and g.claimed != lease}

        def claim() -> tuple[int, list[tuple[str, str, str]], int]:
            refused = self.machine.claim(incarnation, version, leases)
            return int(not refused), refused, int(not refused and self.machine.checkpoint_wanted)

        claimed, refused, _ = self.tell(
            "claim", self.table, incarnation, version, *(part for pair in leases for part in pair),
            read=lambda answer: (answer[2], _refusals(answer), answer[4] if answer[2] else 0),
            to_machine=claim,
        )  # fmt: skip
        assert self.machine.counts["uses"] - before == len(unused) * claimed
        if any(why == "version_ahead" for _, why, _ in refused):
            # A command that comes too early may come again in time.
            self.forget_last("claim")
        return bool(claimed)

    @rule()
    def outdate(self) -> None:
        """The policy moves on by more than the bound: nothing that waits can train any more."""
        self.version = self.machine.u + self.rules.max_staleness + 1
        self.verb("set_policy", "", self.incarnation, self.version)
        self.machine.set_policy(self.incarnation, self.version)
        self.evict()

    @rule()
    def publish(self) -> None:
        self.version = max(self.version, self.machine.u) if self.rules.bounded else self.version + 1
        self.verb("set_policy", "", self.incarnation, self.version)
        self.machine.set_policy(self.incarnation, self.version)

    @rule(at=index)
    def claim_one_twice(self, at: int) -> None:
        group = self.some(GroupState.LEASED, at)
        if group is not None:
            # One copy of the two may be that of an earlier lease.
            leases = [(group.group_id, group.lease)] * 2
            if at % 3 < 2:
                leases[at % 3] = (group.group_id, "earlier")
            self._claim(self.base, leases)

    @precondition(lambda self: self.claimed)
    @rule(at=index, later=st.integers(0, 1))
    def claim_again(self, at: int, later: int) -> None:
        """An answer was lost: the same claim once more, maybe long after."""
        version, leases = self.claimed[at % len(self.claimed)]
        self._claim(version + later, leases)

    @precondition(lambda self: self.claimed)
    @rule(at=index, more=index)
    def claim_more(self, at: int, more: int) -> None:
        """A claim that succeeded, with a group more."""
        version, leases = self.claimed[at % len(self.claimed)]
        group = self.some(GroupState.LEASED, more)
        if group is not None:
            self._claim(version, [*leases, (group.group_id, group.lease)])

    @rule(at=index, priority=st.sampled_from([0.01, 0.5, 1.0, 30.0]))
    def prioritize(self, at: int, priority: float) -> None:
        group = self.some(None, at)
        if group is not None:
            weight = weight_of(priority, 0.6)
            items = [(group.group_id, priority, weight), ("no-such-group", 1.0, 1)]
            incarnation, call = self.incarnation, self.next_call()
            self.tell(
                "set_priorities", self.table, incarnation, call, *(part for item in items for part in item),
                read=lambda answer: answer[2],
                to_machine=lambda: self.machine.set_priorities(incarnation, call, items),
            )  # fmt: skip

    @rule(at=index, disposition=st.sampled_from(["release", "filter", "fail"]))
    def nack(self, at: int, disposition: str) -> None:
        self.sample(0, 1)
        group = self.some(GroupState.LEASED, at)
        if group is not None:
            incarnation, pair = self.incarnation, (group.group_id, group.lease)
            self.tell(
                "nack", self.table, incarnation, disposition, "why", 64, *pair,
                read=lambda answer: answer[2],
                to_machine=lambda: self.machine.nack(incarnation, [pair], disposition, "why"),
            )  # fmt: skip

    @rule(at=index)
    def payload_is_gone(self, at: int) -> None:
        group = self.some([GroupState.GENERATING, GroupState.LEASED, GroupState.CONSUMED][at % 3], at)
        if group is not None:
            pair = (group.group_id, group.lease)
            self.tell(
                "fail_groups", self.table, "payload_lost", *pair,
                read=lambda _answer: None,
                to_machine=lambda: self.machine.fail_groups([pair], "payload_lost"),
            )  # fmt: skip

    @rule(back=st.integers(0, 2))
    def commit(self, back: int) -> None:
        incarnation, version = self.incarnation, max(0, self.base - back)
        self.tell(
            "commit", self.table, incarnation, version, "path", 100,
            read=lambda answer: answer[2],
            to_machine=lambda: self.machine.commit(incarnation, version),
        )  # fmt: skip

    @rule(back=st.integers(0, 3))
    def take_over(self, back: int) -> None:
        self.resume(max(self.machine.committed, self.version - back))

    def resume(self, k: int) -> None:
        call = self.next_call()
        # The answer is about the table `train`.
        told = slice(2, 7) if self.rules.bounded else slice(2, 6)
        self.tell(
            "resume", "train", "learner", k, 1, 0, 1000, call,
            read=lambda answer: tuple(answer[told]),
            to_machine=lambda: self.machine.resume("learner", call, k)[: told.stop - 2],
        )  # fmt: skip
        self.version = k

    @rule(at=index)
    def write_without_the_lease(self, at: int) -> None:
        group = self.some(GroupState.GENERATING, at)
        if group is not None:
            self._write(group.group_id, "a0", group.attempt, 0, True, [0])
            if group.holder:
                given_up = (
                    "release",
                    self.table,
                    group.holder,
                    self.generations[group.holder],
                    "",
                    group.group_id,
                    "a0",
                )
                assert self.verb(*given_up)[2] == 0
        leased, other = self.some(GroupState.LEASED, at), self.some(None, at)
        if leased is not None:
            assert self.verb("nack", self.table, self.incarnation, "release", "", 64, leased.group_id, "s0")[2] == 0
        if other is not None:
            self.verb("fail_groups", self.table, "payload_lost", other.group_id, "s0")

    @rule(at=index)
    def release(self, at: int) -> None:
        group = self.some(GroupState.GENERATING, at)
        if group is not None and group.holder:
            pair = (group.group_id, group.lease)
            member, generation = group.holder, self.generations[group.holder]

            def release() -> int:
                self.check_generation(member, generation)
                return self.machine.release(member, [pair])

            self.tell(
                "release", self.table, member, generation, "", *pair,
                read=lambda answer: answer[2],
                to_machine=release,
            )  # fmt: skip

    @rule(holder=st.sampled_from([*MEMBERS, LEARNER]))
    def attach(self, holder: str) -> None:
        fence = self.incarnation if holder == LEARNER else self.generations[holder]
        answer = self.verb("attach", self.table, holder, fence, "token")
        held = self.machine.attach(holder, self.now)
        assert {g[0].decode() for g in answer[2]} == {g.group_id for g in held}
        if holder != LEARNER:
            self._same_drafts(answer[2], held)

    @rule(holder=st.sampled_from([*MEMBERS, LEARNER]))
    def detach(self, holder: str) -> None:
        self.verb("detach", self.table, holder, "token")
        self.machine.detach(holder, self.now)

    @rule(holder=st.sampled_from([*MEMBERS, LEARNER]), stray=index, at=index)
    def name(self, holder: str, stray: int, at: int) -> None:
        """The holder says what it has: most of it, some of it under an earlier lease, and what it has not."""
        if holder == LEARNER:
            self.sample(0, 2)
        named: list[tuple[str, str]] = []
        for i, group in enumerate(self.machine.groups_held_by(holder)):
            spoken = {1: [""], 3: ["earlier"], 5: ["earlier", group.lease]}
            leases = spoken.get((i + stray) % 8, [group.lease])
            named += [(group.group_id, lease) for lease in leases]
        if (other := self.some(None, at)) is not None and stray % 3 == 0:
            named.append((other.group_id, other.lease))
        fence = self.incarnation if holder == LEARNER else self.generations[holder]
        flat = [part for pair in named for part in pair]
        answer = self.verb("end_unnamed_leases", self.table, holder, fence, "", *flat)
        taken, dead = self.machine.end_unnamed_leases(holder, named)
        assert (answer[2], [(g.decode(), lease.decode()) for g, lease in answer[3]]) == (len(taken), dead)
        self.seen |= {f"forgotten by {'the learner' if holder == LEARNER else 'a generator'}"} if taken else set()

    @rule(holder=st.sampled_from([*MEMBERS, LEARNER]))
    def heartbeat(self, holder: str) -> None:
        member, incarnation = ("m1", self.incarnation) if holder == LEARNER else (holder, 0)
        generation = self.generations[member]

        def beaten() -> tuple[int, int]:
            known, fenced = generation == self.generations[member], 0 < incarnation < self.incarnation
            if known and not fenced:
                self.machine.renew(holder, self.now)
            return int(known), int(fenced)

        self.tell(
            "heartbeat", "", member, generation, b"status", incarnation, 1000,
            read=lambda answer: (answer[1], answer[2]),
            to_machine=beaten,
            renews=True,
        )  # fmt: skip

    @rule()
    def evict(self) -> None:
        evicted, left = self.verb("evict", self.table, 100)[2:]
        assert (len(evicted), left) == (self.machine.evict(), 0)

    @rule()
    def expire(self) -> None:
        answer = self.verb("expire", self.table, 100, 10_000_000)
        assert (answer[2], answer[3]) == self.machine.expire(self.now)

    @rule()
    def make_progress(self) -> None:
        """Whatever has happened, a learner, a generator and a commit get groups trained again."""
        self.take_over(0)
        self.lose_holders()
        self.publish()
        self.commit(0)
        self.evict()
        before = self.machine.counts[Fate.TRAINED]
        for _ in range(3):
            self.fill(4, "m1")
            for group in [g for g in self.machine.groups_held_by("m1") if g.state is GroupState.GENERATING]:
                for member in range(group.task.n):
                    self._write(group.group_id, group.lease, group.attempt, member, True, [0])
            self.sample(0, self.rules.groups_per_step if self.rules.bounded else self.machine.count(GroupState.READY))
            self.claim(0, False, 0)
            self.publish()
            self.evict()
            self.commit(0)
        assert self.machine.counts[Fate.TRAINED] > before, "nothing can be trained any more"
