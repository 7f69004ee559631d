"""Statistics of a table in addition to its counters: ages, waits, checkpoints, evictions by length, Redis' memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.connection import Argument
from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.errors import StoreError
from rollmesh.mesh.tables import TABLES

log = logging.getLogger(__name__)
# Seconds after which the reason of a wait is over, unless a front confirms it.
_REASON_AGE_S = 3


@dataclass(frozen=True, slots=True)
class WaitTotal:
    """Waiting time of one kind, over all fronts, and the present reason; empty without a wait."""

    ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """Statistics of one table; none is below zero.

    Attributes:
        generating_age_ms: age of the oldest group being generated.
        ready_age_ms: waiting time of the oldest ready group among those next in order.
        leases: groups that leases hold.
        dead_letters: failed groups that are kept.
        consumed_bytes: of groups that wait for a commit.
        reserved_bytes: set aside for members that are still to come.
        seeded: greatest ordinal seeded.
        latest_checkpoint: of the last commit; empty without one.
        committed: uses below this version are durable.
        learner_lease_ms: rest of the learner's right to the run.
        waits: by kind.
        evicted_by_tokens: evicted groups by class of length.
        values_swept: stored values removed that no group owned.
        moved_ms: Unix time at which any table moved last; 0 before that.
        unmoved_ms: time since then.
        redis_used_bytes, redis_max_bytes: memory of Redis.
    """

    generating_age_ms: int
    ready_age_ms: int
    leases: int
    dead_letters: int
    consumed_bytes: int
    reserved_bytes: int
    seeded: int
    latest_checkpoint: str
    committed: int
    learner_lease_ms: int
    waits: Mapping[str, WaitTotal]
    evicted_by_tokens: Mapping[int, int]
    values_swept: int
    moved_ms: int
    unmoved_ms: int
    redis_used_bytes: int
    redis_max_bytes: int


class StatisticsStore:
    """The statistics of one run."""

    def __init__(self, access: RedisAccess, keys: Keys) -> None:
        self._redis = access
        self._keys = keys

    async def read(self, table: str, *, kinds: Sequence[str], now_s: float) -> TableStatistics:
        """Reads the statistics of a table.

        Args:
            kinds: kinds of waits.
            now_s: Unix time, by which reasons of waits are judged.

        Raises:
            StoreError: Redis failed, or holds a damaged value.
        """
        keys = self._keys
        ages = await self._redis.run_script("queue_ages", table)
        generating, ready, leases, dead, consumed_bytes, reserved, seeded = (max(0, value) for value in ages[1:])
        (latest, committed, until), flat, swept, lengths, (seconds, micros), memory, *moved = await self._redis.batch(
            [
                ("HMGET", keys.run, "latest", "committed", "learner_until"),
                ("HGETALL", keys.table(table, "waits")),
                ("HGET", keys.table(table), "orphans_swept"),
                ("HGETALL", keys.table(table, "evicted_tokens")),
                ("TIME",),
                ("INFO", "memory"),
                *(("HGET", keys.table(name), "moved_ms") for name in TABLES),
            ]
        )
        waits: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        moved_ms = max(int(at or 0) for at in moved)
        return TableStatistics(
            generating_age_ms=generating,
            ready_age_ms=ready,
            leases=leases,
            dead_letters=dead,
            consumed_bytes=consumed_bytes,
            reserved_bytes=reserved,
            seeded=seeded,
            latest_checkpoint=(latest or b"").decode(),
            committed=int(committed or 0),
            learner_lease_ms=max(0, int(float(until or 0)) - now_ms),
            waits={kind: _wait_total(waits, kind, now_s) for kind in kinds},
            evicted_by_tokens={int(bound): count for bound, count in number_map(lengths).items()},
            values_swept=int(swept or 0),
            moved_ms=moved_ms,
            unmoved_ms=max(0, now_ms - moved_ms) if moved_ms else 0,
            redis_used_bytes=_info(memory, "used_memory"),
            redis_max_bytes=_info(memory, "maxmemory"),
        )

    async def add_waits(self, table: str, waits: Mapping[str, WaitTotal], *, now_s: float) -> None:
        """Adds a front's waiting times since its last call, by kind, each with its present reason."""
        key = self._keys.table(table, "waits")
        commands: list[tuple[Argument, ...]] = []
        for kind, wait in waits.items():
            if wait.ms:
                commands.append(("HINCRBY", key, f"{kind}_ms", wait.ms))
                # Stamped, because the reason of a front that dies stays.
                commands.append(("HSET", key, f"{kind}_reason", f"{int(now_s) if wait.reason else 0} {wait.reason}"))
        await self._redis.batch(commands)


def number_map(flat: Sequence[Any]) -> dict[str, int]:
    """The fields of a hash of numbers.

    Raises:
        StoreError: a value is not a number.
    """
    found = {}
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        try:
            found[name.decode()] = int(value)
        except ValueError:
            log.error("Redis has %r where %s should be a number", value, name.decode())
            raise StoreError(
                f"the value {name.decode()} in Redis is damaged: {value!r} is no number",
                hint="no verb writes that: which program wrote it? start from a backup, or begin a new run",
            ) from None
    return found


def _wait_total(waits: Mapping[bytes, bytes], kind: str, now_s: float) -> WaitTotal:
    at, _, reason = waits.get(f"{kind}_reason".encode(), b"0 ").decode().partition(" ")
    total_ms = int(waits.get(f"{kind}_ms".encode(), 0))
    return WaitTotal(total_ms, reason if now_s - int(at) <= _REASON_AGE_S else "")


def _info(text: bytes, name: str) -> int:
    """A number of Redis' INFO; 0 where it is missing."""
    found = re.search(rf"^{name}:(\d+)", text.decode(), re.MULTILINE)
    return int(found[1]) if found else 0
