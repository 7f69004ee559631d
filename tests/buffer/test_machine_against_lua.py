"""The pure state machine and the Lua verbs on a real Redis get the same commands and must agree after each.

Compared are the answers, every group with all its fields, the state sets, the counters, the pending tasks, the
leases, and the ledger's recount.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Coroutine
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer.keys import Keys
from buffer.ledger import discrepancies
from buffer.policy import gate
from buffer.policy.lineage import VersionRanges
from buffer.policy.machine import LEARNER, TableMachine
from buffer.policy.rules import TableRules
from buffer.policy.states import Fate, Group, State, Task
from buffer.redis_access import RedisAccess
from mesh.versions import PolicyVersion

# Redis TIME replaced by a key that the test moves.
CLOCK = "local function now_ms() return tonumber(redis.call('GET', KEYS[1] .. ':test_clock')) end\n"
MEMBERS = ("m1", "m2")
FIGURES = ("readmissions", "superseded_writes", "duplicate_writes", "withdrawn", "seeded_tasks", "admitted")
WRITE_STATUS = {1: "stored", 2: "duplicate", 3: "superseded", 4: "rejected"}
index = st.integers(0, 30)


class BothMachines(RuleBasedStateMachine):
    """Drives both; `url` is set by the test."""

    url: ClassVar[str] = ""

    @initialize(
        staleness=st.integers(0, 2), fifo=st.booleans(), budget=st.sampled_from([1 << 30, 450]), bounded=st.just(True)
    )
    def begin(self, staleness: int, fifo: bool, budget: int, bounded: bool) -> None:
        self.rules = TableRules(
            groups_per_step=2, max_staleness=staleness, bounded=bounded, fifo=fifo, min_members=1, lease_ms=1000,
            grace_ms=200, max_bytes=budget, max_attempts=2,
        )  # fmt: skip
        self.loop = asyncio.new_event_loop()
        self.keys = Keys(uuid.uuid4().hex)
        self.redis = RedisAccess(self.url, self.keys.run, clock=CLOCK)
        self.machine = TableMachine("train", self.rules)
        self.now = 1_000_000
        self.version = 0
        self.old: list[tuple[str, str, int]] = []
        self.call(self.redis.client.set(f"{self.keys.run}:test_clock", self.now))
        self.call(self.redis.client.hset(f"{self.keys.run}:generations", mapping=dict.fromkeys(MEMBERS, 1)))
        for table in ("train", "eval"):
            flat = [part for pair in self.rules.to_fields().items() for part in pair]
            self.verb("bootstrap", table, *flat)
        self.verb("expire", "train", 100, 10_000_000)
        self.resume(0)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.call(self.redis.close())
            self.loop.close()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def verb(self, name: str, *arguments: Any) -> list[Any]:
        return self.call(self.redis.verb(name, *arguments))  # type: ignore[no-any-return]

    @property
    def incarnation(self) -> int:
        return self.machine.lineage.incarnation

    def some(self, state: State | None, at: int) -> Group | None:
        groups = [g for g in self.machine.groups.values() if state is None or g.state is state]
        return groups[at % len(groups)] if groups else None

    # ---------------------------------------------------------------------------------------------- commands

    @rule(ms=st.sampled_from([1, 150, 400, 1100]))
    def time_passes(self, ms: int) -> None:
        self.now += ms
        self.call(self.redis.client.set(f"{self.keys.run}:test_clock", self.now))

    @rule(count=st.integers(1, 4), again=st.booleans(), end=st.booleans(), withdraw=st.sampled_from([False] * 7 + [True]))
    def seed(self, count: int, again: bool, end: bool, withdraw: bool) -> None:
        first = self.machine.seeded + (0 if again else 1)
        tasks = [Task(o, 2, "", 100, f"t{o}") for o in range(max(1, first), max(1, first) + count)]
        flat: list[Any] = []
        for t in tasks:
            flat += [t.ordinal, json.dumps([t.ordinal, t.n, t.pin, t.reserve, t.task_id, "", 0]), t.pin]
        answer = self.verb("seed", "train", self.incarnation, int(end), int(withdraw), *flat)
        added, withdrawn = self.machine.seed(self.incarnation, tasks, end_of_data=end, withdraw=withdraw)
        assert (answer[2], answer[5]) == (added, withdrawn)

    @rule(member=st.sampled_from(MEMBERS), behind=st.integers(0, 2), wanted=st.integers(1, 5))
    def admit(self, member: str, behind: int, wanted: int) -> None:
        serving = PolicyVersion(self.incarnation, max(0, self.version - behind))
        u, rules = self.machine.u, self.rules
        limit = gate.live_limit(u, serving.version, rules.groups_per_step, rules.max_staleness)
        answer = self.verb(
            "admit", "train", member, 1, serving.incarnation, serving.version, wanted, u, limit
        )
        granted = self.machine.admit(member, serving, wanted, limit, self.now)
        assert [(g[0].decode(), g[1].decode(), g[2]) for g in answer[2]] == [
            (g.group_id, g.lease, g.attempt) for g in granted
        ]
        self.old += [(g.group_id, g.lease, g.attempt) for g in granted]

    @rule(at=index, member=st.integers(0, 2), scored=st.booleans(), ages=st.lists(st.integers(0, 3), min_size=1, max_size=2))
    def write_current(self, at: int, member: int, scored: bool, ages: list[int]) -> None:
        group = self.some(None, at)
        if group is not None:
            self._write(group.group_id, group.lease, group.attempt, member % 3, scored, ages)

    @precondition(lambda self: self.old)
    @rule(at=index, member=st.integers(0, 1), ages=st.lists(st.integers(0, 3), min_size=1, max_size=2))
    def write_any(self, at: int, member: int, ages: list[int]) -> None:
        self._write(*self.old[at % len(self.old)], member, True, ages)

    def _write(self, gid: str, lease: str, attempt: int, member: int, scored: bool, ages: list[int]) -> None:
        versions = [PolicyVersion(max(1, self.incarnation - age // 2), max(0, self.version - age)) for age in ages]
        ranges = VersionRanges.of(versions) if scored else VersionRanges()
        size = 50 if scored else 0
        answer = self.verb("write", "train", gid, lease, attempt, member, int(scored), size, str(ranges), b"meta")
        status, sealed = self.machine.write(gid, lease, attempt, member, scored=scored, size=size, ranges=ranges)
        got, was_sealed, _ = answer[2][0]
        assert (WRITE_STATUS[got], bool(was_sealed)) == (status, sealed)

    @rule(ahead=st.integers(0, 1), count=st.integers(1, 3))
    def sample(self, ahead: int, count: int) -> None:
        version = self.machine.u + ahead
        ready = sorted((g for g in self.machine.groups.values() if g.state is State.READY), key=lambda g: g.order)
        ids = [g.group_id for g in ready[:count]]
        answer = self.verb("sample", "train", self.incarnation, version, *ids)
        leased = self.machine.sample(self.incarnation, version, ids, self.now)
        assert [(g[0].decode(), g[1].decode()) for g in answer[2]] == [(g.group_id, g.lease) for g in leased]

    @rule(ahead=st.sampled_from([0, 0, 0, -1, 1]), lost=st.sampled_from([False] * 5 + [True]), drop=st.integers(0, 1))
    def claim(self, ahead: int, lost: bool, drop: int) -> None:
        version = max(0, self.machine.u + ahead)
        leases = [
            (g.group_id, "wrong" if lost else g.lease)
            for g in self.machine.groups.values()
            if g.state is State.LEASED or (g.state is State.CONSUMED and g.train_version == version)
        ][drop:]
        if not leases:
            return
        flat = [part for pair in leases for part in pair]
        answer = self.verb("claim", "train", self.incarnation, version, *flat)
        refused = self.machine.claim(self.incarnation, version, leases)
        assert [(g.decode(), why.decode()) for g, why in answer[3]] == refused
        assert bool(answer[2]) == (not refused)

    @rule()
    def publish(self) -> None:
        self.version = max(self.version, self.machine.u)
        self.verb("set_policy", "", self.incarnation, self.version)
        self.machine.set_policy(self.incarnation, self.version)

    @rule(at=index, disposition=st.sampled_from(["release", "filter", "fail"]))
    def nack(self, at: int, disposition: str) -> None:
        group = self.some(State.LEASED, at)
        if group is not None:
            pair = (group.group_id, group.lease)
            answer = self.verb("nack", "train", self.incarnation, disposition, "why", *pair)
            assert answer[2] == self.machine.nack(self.incarnation, [pair], disposition, "why")

    @rule(back=st.integers(0, 2))
    def commit(self, back: int) -> None:
        version = max(0, self.machine.u - back)
        answer = self.verb("commit", "train", self.incarnation, version, "path", 100)
        assert answer[2] == self.machine.commit(self.incarnation, version)

    @rule(back=st.integers(0, 3))
    def take_over(self, back: int) -> None:
        self.resume(max(self.machine.committed, self.version - back))

    def resume(self, k: int) -> None:
        answer = self.verb("resume", "train", "learner", k, 1, 0, 1000)
        assert answer[0] == b"ok"
        assert tuple(answer[3:6]) == self.machine.resume(k)
        self.version = k

    @rule(at=index, old=st.booleans())
    def zombie_is_fenced(self, at: int, old: bool) -> None:
        answer = self.verb("commit", "train", self.incarnation - 1, 99, "path", 100)
        assert answer[0] == b"fenced"
        assert self.verb("sample", "train", self.incarnation - 1, 0, "train-1")[0] == b"fenced"

    @rule(at=index)
    def release(self, at: int) -> None:
        group = self.some(State.GENERATING, at)
        if group is not None and group.holder:
            pair = (group.group_id, group.lease)
            answer = self.verb("release", "train", group.holder, 1, *pair)
            assert answer[2] == self.machine.release(group.holder, [pair])

    @rule(holder=st.sampled_from([*MEMBERS, LEARNER]))
    def attach(self, holder: str) -> None:
        fence = self.incarnation if holder == LEARNER else 1
        answer = self.verb("attach", "train", holder, fence, "token")
        held = self.machine.attach(holder, self.now)
        assert {g[0].decode() for g in answer[2]} == {g.group_id for g in held}

    @rule(holder=st.sampled_from([*MEMBERS, LEARNER]))
    def detach(self, holder: str) -> None:
        self.verb("detach", "train", holder, "token")
        self.machine.detach(holder, self.now)

    @rule(holder=st.sampled_from([*MEMBERS, LEARNER]))
    def beat(self, holder: str) -> None:
        member, incarnation = ("m1", self.incarnation) if holder == LEARNER else (holder, 0)
        self.verb("heartbeat", "", member, 1, b"status", incarnation, 1000)
        self.machine.beat(holder, self.now)

    @rule()
    def evict(self) -> None:
        assert self.verb("evict", "train", 100)[2] == self.machine.evict()

    @rule()
    def expire(self) -> None:
        answer = self.verb("expire", "train", 100, 10_000_000)
        assert (answer[2], answer[3]) == self.machine.expire(self.now)

    # ------------------------------------------------------------------------------------------- comparison

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "machine"):
            return
        self.machine.check()
        self.call(self._compare())

    async def _compare(self) -> None:
        machine, redis, keys = self.machine, self.redis.client, self.keys
        pipe = redis.pipeline(transaction=False)
        for gid in machine.groups:
            pipe.hgetall(keys.table("train", f"g:{gid}"))
        stored = dict(zip(machine.groups, await pipe.execute(), strict=True))
        for gid, group in machine.groups.items():
            assert {k.decode(): v.decode() for k, v in stored[gid].items() if k.decode() in FIELDS} == _fields(group)
        for state in State:
            members = {m.decode() for m in await redis.zrange(keys.table("train", state), 0, -1)}
            assert members == {g.group_id for g in machine.groups.values() if g.state is state}
        deadlines = {m.decode(): int(s) for m, s in await redis.zrange(keys.table("train", "deadline"), 0, -1, withscores=True)}
        assert deadlines == {
            g.group_id: g.deadline for g in machine.groups.values() if g.state in (State.GENERATING, State.READY)
        }
        ready = [m.decode() for m in await redis.zrange(keys.table("train", "ready"), 0, -1)]
        order = sorted((g for g in machine.groups.values() if g.state is State.READY), key=lambda g: (g.order, g.group_id))
        assert ready == [g.group_id for g in order]
        holders = {m.decode(): int(s) for m, s in await redis.zrange(keys.table("train", "holders"), 0, -1, withscores=True)}
        assert holders == machine.holders
        for holder in (*MEMBERS, LEARNER):
            held = {m.decode() for m in await redis.smembers(keys.table("train", f"held:{holder}"))}
            assert held == {g.group_id for g in machine.held(holder)}
        pending = [json.loads(e) for e in await redis.zrange(keys.table("train", "pending:"), 0, -1)]
        assert [(p[0], p[5], p[6]) for p in pending] == [
            (t.ordinal, t.parent, t.refills) for t in sorted(machine.pending, key=lambda t: t.ordinal)
        ]
        await self._compare_ledger()

    async def _compare_ledger(self) -> None:
        machine = self.machine
        answer = await self.redis.verb("ledger", "train", 0)
        counters = {answer[2][i].decode(): answer[2][i + 1] for i in range(0, len(answer[2]), 2)}
        recount = {answer[3][i].decode(): answer[3][i + 1] for i in range(0, len(answer[3]), 2)}
        reasons = {answer[4][i].decode(): int(answer[4][i + 1]) for i in range(0, len(answer[4]), 2)}
        assert discrepancies(counters, recount) == []
        assert {n: counters[n] for n in FIGURES} == {n: machine.counts[n] for n in FIGURES}
        assert {fate: counters[fate] for fate in Fate} == {fate: machine.counts[fate] for fate in Fate}
        assert reasons == dict(machine.reasons)
        view = answer[1]
        orphans = sum(g.orphan for g in machine.groups.values())
        assert (view[3], view[9], view[10], view[11], view[12]) == (
            machine.u, int(machine.end_of_data), machine.bytes, machine.reserved, orphans,
        )  # fmt: skip


FIELDS = frozenset(
    {"state", "ordinal", "holder", "lease", "attempt", "lost", "orphan", "done", "scored", "bytes", "ranges", "payloads",
     "deadline", "seq", "order"}
)  # fmt: skip


def _fields(group: Group) -> dict[str, str]:
    return {
        "state": group.state.value,
        "ordinal": str(group.task.ordinal),
        "holder": group.holder,
        "lease": group.lease,
        "attempt": str(group.attempt),
        "lost": str(group.lost),
        "orphan": str(int(group.orphan)),
        "done": "".join("1" if flag else "0" for flag in group.done),
        "scored": str(group.scored),
        "bytes": str(group.bytes),
        "ranges": str(group.ranges),
        "payloads": ",".join(f"{m}:{a}" for m, a in group.payloads),
        "deadline": str(group.deadline),
        "seq": str(group.seq),
        "order": str(group.order),
    }


@pytest.mark.timeout(120)
def test_policy_machine_and_lua_verbs_agree(redis_url: str) -> None:
    BothMachines.url = redis_url
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        BothMachines,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
