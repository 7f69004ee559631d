"""Payloads in Redis: plain keys, spread over all slots, that never pass through Lua.

Invariants
  * A payload counts only through the write script. The end of its group removes it; what no script ever names, and none
    can name any more, is swept (`buffer.store.unowned_values`).
  * A small payload is one value. A large one is in pieces, a key each, uploaded before the write that names their
    number.
  * A key holds the digest of its payload, and the script's note of a member holds the key. So metadata and bytes that
    were written together stay together, whatever dies in between, and however late something else is written. The
    attempt is part of the key as well, so that a late attempt cannot touch what the valid one stored.
  * Whatever is read is read in portions of bounded size.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple, Protocol

import xxhash

from rollmesh.buffer.protocol.limits import INLINE_BYTES
from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.payload_cache import PayloadCache

# Bytes read from Redis at once.
_PORTION_BYTES = 512 << 10
_KEYS_AT_ONCE = 1024
# In the name of a payload.
_COLONS = 2


class PayloadRef(NamedTuple):
    """Names the payload of a member (`name_of`), and the number of its pieces (0: one whole value)."""

    name: str
    pieces: int = 0

    @property
    def member(self) -> int:
        return int(self.name.partition(":")[0])


class StoredGroup(Protocol):
    """The stored payloads of a group: references to them, and the sum of their bytes."""

    @property
    def group_id(self) -> str: ...
    @property
    def payload_refs(self) -> Sequence[PayloadRef]: ...
    @property
    def size(self) -> int: ...


# Per payload: its bytes; empty where it is there but has to be fetched; None where it is lost.
Values = list[bytes | None]


class PayloadChunk(NamedTuple):
    """Bytes of a payload; `last` says that they are its end."""

    data: bytes
    last: bool


class PayloadMissing(Exception):  # noqa: N818  an answer: the caller knows what it means
    """A value that is not there (any more)."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


# The command that stores a value, unless there is one.
SetValue = tuple[str, str, bytes, str]


def set_value(key: str, value: bytes) -> SetValue:
    """Stores a value under a key. One that is there has the same bytes, since the key holds their digest."""
    return ("SET", key, value, "NX")


def digest_of(payload: bytes) -> str:
    """xxh3-64, as 16 hexadecimal digits: distinguishes payloads, and does not protect against forgery."""
    return xxhash.xxh3_64_hexdigest(payload)


def name_of(member: int, attempt: int, digest: str) -> str:
    """Names a payload among those of its group."""
    return f"{member}:{attempt}:{digest}"


def parse_payload_refs(text: bytes | str) -> tuple[PayloadRef, ...]:
    """Parses the scripts' notes of a group's payloads: `name[:pieces],...`."""
    parts = _parts(text)
    return tuple(map(PayloadRef, parts)) if _all_in_one_piece(parts) else tuple(map(_parse_ref, parts))


def _parts(text: bytes | str) -> list[str]:
    plain = text.decode() if isinstance(text, bytes) else text
    return plain.split(",") if plain else []


def _all_in_one_piece(parts: Sequence[str]) -> bool:
    return sum([part.count(":") for part in parts]) == _COLONS * len(parts)


def _parse_ref(part: str) -> PayloadRef:
    name, _, pieces = part.rpartition(":")
    return PayloadRef(part) if part.count(":") == _COLONS else PayloadRef(name, int(pieces))


class Payloads:
    """Reads and writes payload values of one run.

    Args:
        access: Redis.
        keys: names.
    """

    def __init__(self, access: RedisAccess, keys: Keys) -> None:
        self._redis = access
        self._keys = keys
        self.cache = PayloadCache()

    def keys_of(self, table: str, group_id: str, ref: PayloadRef) -> list[str]:
        """Keys of one payload, in the order of its bytes."""
        return _keys(self._keys.payloads(table, group_id), ref)

    def keys_of_groups(self, table: str, groups: Iterable[tuple[str, bytes | str]]) -> list[str]:
        """Keys of all payloads of groups, given as (group id, notes of the scripts)."""
        keys: list[str] = []
        for group_id, text in groups:
            prefix, parts = self._keys.payloads(table, group_id), _parts(text)
            if _all_in_one_piece(parts):
                keys += [prefix + part for part in parts]
            else:
                keys += [key for part in parts for key in _keys(prefix, _parse_ref(part))]
        return keys

    async def put_piece(self, table: str, group_id: str, ref: PayloadRef, piece: int, data: bytes) -> bool:
        """Stores one piece of a large payload, unless there is one; whether there is this one now."""
        key = self._keys.payload(table, group_id, ref.name, piece)
        (done,) = await self._redis.batch([("SET", key, data, "NX")])
        return done is not None or await self._redis.mget([key]) == [data]

    async def sizes(self, keys: Sequence[str]) -> list[int]:
        """Bytes of each value; 0 where it is missing."""
        found: list[int] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            found += await self._redis.batch([("STRLEN", key) for key in keys[start : start + _KEYS_AT_ONCE]])
        return found

    async def begins_with(self, key: str, head: bytes) -> bool:
        """True if a value begins with these bytes."""
        (start,) = await self._redis.batch([("GETRANGE", key, 0, len(head) - 1)])
        return bool(start == head)

    async def of_groups(self, table: str, groups: Sequence[StoredGroup], *, inline: bool) -> AsyncIterator[Values]:
        """Yields the payload values of each group, in order of their references.

        Args:
            table: of the groups.
            groups: where their payloads are.
            inline: read them; else only see whether they are there.
        """
        loads = [group.size if inline and group.size <= INLINE_BYTES else 0 for group in groups]
        for portion in _in_portions(loads, INLINE_BYTES):
            read: list[str] = []
            looked: list[str] = []
            for at in portion:
                prefix = self._keys.payloads(table, groups[at].group_id)
                for ref in groups[at].payload_refs:
                    if loads[at] and not ref.pieces:
                        read.append(prefix + ref.name)
                    else:
                        looked += _keys(prefix, ref)
            values, sizes = iter(await self._values(read)), iter(await self.sizes(looked))
            for at in portion:
                found: list[bytes | None] = []
                for ref in groups[at].payload_refs:
                    if loads[at] and not ref.pieces:
                        found.append(next(values))
                    else:
                        present = [next(sizes) > 0 for _ in range(max(1, ref.pieces))]
                        found.append(b"" if all(present) else None)
                yield found

    async def _values(self, keys: Sequence[str]) -> list[bytes | None]:
        """Whole values: from the cache, the others from Redis."""
        found = [self.cache.pop(key) for key in keys]
        missing = [key for key, value in zip(keys, found, strict=True) if value is None]
        if not missing:
            return found
        others = iter(await self._redis.mget(missing))
        return [next(others) if value is None else value for value in found]

    async def stream(self, table: str, members: Sequence[tuple[str, PayloadRef]]) -> AsyncIterator[PayloadChunk]:
        """Payloads of members, concatenated, in chunks of at most a piece; one portion is read ahead.

        Raises:
            PayloadMissing: with the index of the member that lacks its payload.
        """
        requested = [
            (key, index, last)
            for index, (group_id, ref) in enumerate(members)
            for key, last in _with_last(self.keys_of(table, group_id, ref))
        ]
        lengths = await self.sizes([key for key, _, _ in requested])
        for (_, index, _), length in zip(requested, lengths, strict=True):
            if not length:
                raise PayloadMissing(index)
        portions = _in_portions(lengths, _PORTION_BYTES)
        ahead: asyncio.Task[list[bytes | None]] | None = None
        try:
            for number, portion in enumerate(portions):
                values = await (ahead or self._get(requested, portion))
                ahead = None
                if number + 1 < len(portions):
                    ahead = asyncio.create_task(self._get(requested, portions[number + 1]))
                for at, value in zip(portion, values, strict=True):
                    if value is None:
                        raise PayloadMissing(requested[at][1])
                    yield PayloadChunk(value, requested[at][2])
                del values, value
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _get(self, requested: Sequence[tuple[str, int, bool]], portion: range) -> list[bytes | None]:
        return await self._redis.mget([requested[at][0] for at in portion])


def _keys(prefix: str, ref: PayloadRef) -> list[str]:
    key = prefix + ref.name
    return [f"{key}:{piece}" for piece in range(ref.pieces)] if ref.pieces else [key]


def _with_last(keys: Sequence[str]) -> list[tuple[str, bool]]:
    return [(key, index == len(keys) - 1) for index, key in enumerate(keys)]


def _in_portions(lengths: Sequence[int], limit: int) -> list[range]:
    """Cuts a sequence into runs with lengths that add up to at most `limit` (or that hold one entry)."""
    cut: list[range] = []
    start = size = 0
    for index, length in enumerate(lengths):
        if index > start and size + length > limit:
            cut.append(range(start, index))
            start, size = index, 0
        size += length
    if start < len(lengths):
        cut.append(range(start, len(lengths)))
    return cut
