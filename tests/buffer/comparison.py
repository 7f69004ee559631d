"""The state of the machine and of Redis that must be equal, after each command: read from both, and compared.

Compared are every group with all its fields, the state sets, the counters, the pending tasks, the leases and the
drafts. So are the cancellations for generators, the notes of failed groups, and the ledger's recount.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import msgpack
from hypothesis.stateful import RuleBasedStateMachine, invariant

from rollmesh.buffer.protocol.leases import LEARNER
from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.reference_model.group_states import Fate, GroupState
from rollmesh.buffer.reference_model.table_machine import TableMachine
from rollmesh.buffer.server.ledger import discrepancies
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.table_snapshot import TableSnapshot
from tests.buffer.groups_as_stored import DIGEST, fields_of
from tests.buffer.packed import record_of

MEMBERS = ("m1", "m2")
HOLDERS = (*MEMBERS, LEARNER)
COUNTED = (
    *Fate, "readmissions", "superseded_writes", "duplicate_writes", "withdrawn", "seeded_tasks", "admitted",
    "cancelled", "redriven",
)  # fmt: skip


class ComparedMachines(RuleBasedStateMachine):
    """Both machines side by side."""

    machine: TableMachine
    redis: RedisAccess
    keys: Keys
    table: str
    loop: asyncio.AbstractEventLoop

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "machine"):
            return
        self.machine.check()
        self.call(self._compare())

    async def _compare(self) -> None:
        machine, keys = self.machine, self.keys
        names = ("deadline", "reuse", "holders", *GroupState)
        pipe = self.redis.client.pipeline(transaction=False)
        for gid in machine.groups:
            pipe.hget(keys.table(self.table, f"g:{gid}"), "group")
        for name in names:
            pipe.zrange(keys.table(self.table, name), 0, -1, withscores=True)
        for holder in HOLDERS:
            pipe.zrange(keys.table(self.table, "leased" if holder == LEARNER else f"held:{holder}"), 0, -1)
        pins = sorted({"", *(task.pin for task in machine.pending)})
        for pin in pins:
            pipe.zrange(keys.table(self.table, f"pending:{pin}"), 0, -1)
        for gid in machine.groups:
            pipe.hmget(keys.table(self.table, f"g:{gid}"), "d0", "d1")
        for member in MEMBERS:
            pipe.smembers(keys.table(self.table, f"cancels:{member}"))
        pipe.hgetall(keys.table(self.table, "dead"))
        pipe.lrange(keys.table(self.table, "failures"), 0, -1)
        pipe.hgetall(keys.table(self.table, "evicted_tokens"))
        pipe.smembers(keys.table(self.table, "trash"))
        pipe.keys(keys.digest(self.table, "*"))
        pipe.hget(keys.table(self.table), "moved_ms")
        answers = iter(await pipe.execute())
        self._record_progress()
        groups = machine.groups.values()
        for group in groups:
            stored = record_of(next(answers))
            expected = fields_of(group)
            assert {name: stored[name] for name in expected} == expected
            assert (stored["uses"] or []) == group.uses
            assert (stored["drafts"] or 0) == len(machine.drafts[group.group_id])
            assert (stored["previous_holder"] or "", stored["causes"] or []) == (group.previous_holder, group.causes)
            assert stored["tokens"] == group.tokens
            assert (stored["state"] == "generating" and not stored["holder"]) == group.orphan
            assert len(list(filter(None, stored["payloads"].split(",")))) == group.scored
        scored = {name: {m.decode(): score for m, score in next(answers)} for name in names}
        for state in GroupState:
            assert set(scored[state]) == {g.group_id for g in groups if g.state is state}
        unleased = (GroupState.GENERATING, GroupState.READY)
        waiting = [g for g in groups if g.state in unleased]
        assert scored["deadline"] == {g.group_id: g.deadline for g in waiting if not g.uses}
        assert scored["reuse"] == {g.group_id: g.deadline for g in waiting if g.uses}
        assert scored[GroupState.READY] == {g.group_id: g.order for g in groups if g.state is GroupState.READY}
        assert scored["holders"] == machine.holders
        for holder in HOLDERS:
            assert {m.decode() for m in next(answers)} == {g.group_id for g in machine.groups_held_by(holder)}
        for pin in pins:
            pending = [msgpack.unpackb(entry) for entry in next(answers)]
            assert [(p[0], p[5], p[6]) for p in pending] == [
                (t.ordinal, t.parent, t.refills)
                for t in sorted(machine.pending, key=lambda t: t.ordinal)
                if t.pin == pin
            ]
        for group in groups:
            drafts = machine.drafts[group.group_id]
            texts = {m: f"{d.attempt} {d.tokens} {DIGEST} {d.ranges}".encode() for m, d in drafts.items()}
            assert next(answers) == [texts.get(0), texts.get(1)]
        for member in MEMBERS:
            assert {tuple(entry.decode().split()) for entry in next(answers)} == machine.cancels.read(member)
        *endings, in_use, moved_ms = answers
        digests = await self.redis.mget(in_use)
        prompts = {int(key.rpartition(b":")[2]): digest for key, digest in zip(in_use, digests, strict=True)}
        self._compare_endings(*endings, prompts)
        assert int(moved_ms or 0) == self.moved_ms
        await self._compare_ledger()

    def _compare_endings(
        self,
        dead: dict[bytes, bytes],
        failures: list[bytes],
        evicted: dict[bytes, bytes],
        trash: set[bytes],
        prompts: dict[int, bytes | None],
    ) -> None:
        """Notes of failed groups, evictions by length, and that no prompt is thrown away that is still needed."""
        machine = self.machine
        notes = {gid.decode(): json.loads(note) for gid, note in dead.items()}
        assert [gid.decode() for gid in reversed(failures)] == list(machine.dead_letters.notes)
        assert {
            gid: (n["ordinal"], n["reason"], n["attempts"], tuple(n.get("causes", ())), n["kept"], n["redriven"])
            for gid, n in notes.items()
        } == {
            gid: (n.task.ordinal, n.reason, n.attempts, n.causes, n.kept, n.redriven)
            for gid, n in machine.dead_letters.notes.items()
        }
        assert {int(bound): int(count) for bound, count in evicted.items()} == dict(machine.evicted_tokens)
        thrown = {prompt for entry in trash if (prompt := entry.decode().split("|")[1])}
        owners = [*machine.pending, *(note.task for note in machine.dead_letters.notes.values() if note.kept)]
        owners += [group.task for group in machine.groups.values()]
        needed = [task.ordinal for task in owners]
        assert len(needed) == len(set(needed)), "a prompt has one owner"
        in_use = {task.ordinal: task.digest for task in owners if task.digest}
        assert {ordinal: (digest or b"").decode() for ordinal, digest in prompts.items()} == in_use
        assert thrown.isdisjoint(f"{ordinal}:{digest}" for ordinal, digest in in_use.items())

    async def _compare_ledger(self) -> None:
        machine = self.machine
        _, view, *flat, _ = await self.redis.run_script("ledger", self.table, 0)
        counters, recount, reasons = (
            {name.decode(): int(value) for name, value in zip(part[::2], part[1::2], strict=True)} for part in flat
        )
        assert discrepancies(counters, recount) == []
        assert {name: counters[name] for name in COUNTED} == {name: machine.counts[name] for name in COUNTED}
        assert reasons == dict(machine.reasons)
        view_of_redis = TableSnapshot.from_reply(view)
        assert (view_of_redis.u, view_of_redis.end_of_data, view_of_redis.demand) == (
            machine.u, int(machine.end_of_data), machine.demand,
        )  # fmt: skip
        assert (view_of_redis.bytes, view_of_redis.reserved) == (machine.bytes, machine.reserved)
        assert view_of_redis.orphaned == sum(g.orphan for g in machine.groups.values())
