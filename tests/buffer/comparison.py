"""The state of the machine and of Redis that must be equal, after each command: read from both, and compared.

Compared are every group with all its fields, the state sets, the counters, the pending tasks, the leases and the
drafts. So are the cancellations for generators, the notes of failed groups, and the ledger's recount.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
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
        pins = sorted({"", *(task.pin for task in machine.pending)})
        in_use = self._prompts_in_use()
        # One round trip, since this is asked after each command.
        *replies, ledger = await self.redis.run_all_after(
            [
                *(("HMGET", keys.table(self.table, f"g:{gid}"), "group", "d0", "d1") for gid in machine.groups),
                *(("ZRANGE", keys.table(self.table, name), 0, -1, "WITHSCORES") for name in names),
                *(("ZRANGE", keys.held_groups(self.table, holder), 0, -1) for holder in HOLDERS),
                *(("ZRANGE", keys.table(self.table, f"pending:{pin}"), 0, -1) for pin in pins),
                *(("SMEMBERS", keys.table(self.table, f"cancels:{member}")) for member in MEMBERS),
                ("HGETALL", keys.table(self.table, "dead")),
                ("LRANGE", keys.table(self.table, "failures"), 0, -1),
                ("HGETALL", keys.table(self.table, "evicted_tokens")),
                ("SMEMBERS", keys.table(self.table, "trash")),
                ("KEYS", keys.digest(self.table, "*")),
                ("HGET", keys.table(self.table), "moved_ms"),
                *(("GET", keys.digest(self.table, ordinal)) for ordinal in in_use),
            ],
            [("ledger", self.table, 0)],
        )
        answers = iter(replies)
        self._record_progress()
        groups = machine.groups.values()
        for group in groups:
            packed, *drafts_stored = next(answers)
            drafts = machine.drafts[group.group_id]
            texts = {m: f"{d.attempt} {d.tokens} {DIGEST} {d.ranges}".encode() for m, d in drafts.items()}
            assert drafts_stored == [texts.get(0), texts.get(1)]
            stored = record_of(packed)
            expected = fields_of(group)
            assert {name: stored[name] for name in expected} == expected
            assert (stored["uses"] or []) == group.uses
            assert (stored["drafts"] or 0) == len(drafts)
            assert (stored["previous_holder"] or "", stored["causes"] or []) == (group.previous_holder, group.causes)
            assert stored["tokens"] == group.tokens
            assert (stored["state"] == "generating" and not stored["holder"]) == group.orphan
            assert len(list(filter(None, stored["payloads"].split(",")))) == group.scored
        scored = {name: {m.decode(): float(score) for m, score in _pairs(next(answers))} for name in names}
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
        for member in MEMBERS:
            assert {tuple(entry.decode().split()) for entry in next(answers)} == machine.cancels.read(member)
        dead, failures, evicted, trash, names_in_use, moved_ms, *digests = answers
        assert {int(key.rpartition(b":")[2]) for key in names_in_use} == in_use.keys()
        assert [digest.decode() for digest in digests] == list(in_use.values())
        self._compare_endings(dict(_pairs(dead)), failures, dict(_pairs(evicted)), trash, in_use)
        assert int(moved_ms or 0) == self.moved_ms
        self._compare_ledger(ledger)

    def _prompts_in_use(self) -> dict[int, str]:
        """Digests of the prompts that have an owner, by ordinal."""
        machine = self.machine
        owners = [*machine.pending, *(note.task for note in machine.dead_letters.notes.values() if note.kept)]
        owners += [group.task for group in machine.groups.values()]
        ordinals = [task.ordinal for task in owners]
        assert len(ordinals) == len(set(ordinals)), "a prompt has one owner"
        return {task.ordinal: task.digest for task in owners if task.digest}

    def _compare_endings(
        self,
        dead: dict[bytes, bytes],
        failures: list[bytes],
        evicted: dict[bytes, bytes],
        trash: list[bytes],
        in_use: dict[int, str],
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
        assert thrown.isdisjoint(f"{ordinal}:{digest}" for ordinal, digest in in_use.items())

    def _compare_ledger(self, reply: list[Any]) -> None:
        machine = self.machine
        _, view, *flat, _ = reply
        counters, recount, reasons = ({name.decode(): int(value) for name, value in _pairs(part)} for part in flat)
        assert discrepancies(counters, recount) == []
        assert {name: counters[name] for name in COUNTED} == {name: machine.counts[name] for name in COUNTED}
        assert reasons == dict(machine.reasons)
        view_of_redis = TableSnapshot.from_reply(view)
        assert (view_of_redis.u, view_of_redis.end_of_data, view_of_redis.demand) == (
            machine.u, int(machine.end_of_data), machine.demand,
        )  # fmt: skip
        assert (view_of_redis.bytes, view_of_redis.reserved) == (machine.bytes, machine.reserved)
        assert view_of_redis.orphaned == sum(g.orphan for g in machine.groups.values())


def _pairs(flat: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Members and their scores, or fields and their values, as Redis lists them."""
    return zip(flat[::2], flat[1::2], strict=True)
