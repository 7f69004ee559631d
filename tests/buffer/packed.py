"""The packed values in Redis: records of groups; counters and rules of a table, changed by tests as no verb would."""

from __future__ import annotations

from typing import Any

import msgpack

from rollmesh.buffer.server.process import BufferFront
from rollmesh.buffer.store.keys import Keys

_RECORD = (
    "ordinal", "n", "pin", "reserve", "task", "parent", "refills",
    "state", "order", "deadline", "grant", "attempt", "lost", "lease", "holder", "for_version",
    "done", "bytes", "ranges", "payloads", "tokens", "admitted_ms", "sealed_ms", "leased_ms",
    "uses", "claimed", "drafts", "previous_holder", "causes", "seal", "draw", "payload_lost",
)  # fmt: skip


def record_of(packed: bytes) -> dict[str, Any]:
    """A group's record by name."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(packed)
    return dict(zip(_RECORD, unpacker, strict=True))


async def read_counter(front: BufferFront, table: str, name: str) -> int:
    """One counter of a table."""
    return int((await _read(front, table, "counters"))[name])


async def set_counter(front: BufferFront, table: str, name: str, value: int) -> None:
    """Changes one counter, as no verb would."""
    await _change(front, table, "counters", name, value)


async def set_rule(front: BufferFront, table: str, name: str, value: int) -> None:
    """Changes one rule for every verb from now on."""
    await _change(front, table, "rules", name, value)


async def _read(front: BufferFront, table: str, field: str) -> dict[str, Any]:
    packed = await front.access.client.hget(Keys(front.run_name).table(table), field)
    return dict(msgpack.unpackb(packed))


async def _change(front: BufferFront, table: str, field: str, name: str, value: int) -> None:
    packed = msgpack.packb({**await _read(front, table, field), name: value})
    await front.access.client.hset(Keys(front.run_name).table(table), field, packed)
