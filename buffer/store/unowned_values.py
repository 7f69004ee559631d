"""Stored values that no group owns: found by a slow sweep over the keys, and removed.

They come from a front that died between a SET and its script, from superseded writes, from refused tasks, and from
lost removals.

Invariants
  * A value is unowned only if no script can ever accept it any more. Its group has ended (ids are never used again),
    its member is stored under another name, or its attempt is over (attempts only grow). That never changes back, so a
    sweep cannot race with a write. A value that a dead front has SET for a member that its holder may still write is
    owned. The repeated write finds it, and it stays. A prompt is unowned if its ordinal was seeded (that is done once)
    and the table does not name it.
  * An unowned value is removed in two passes. The first lets it expire in `_MARK_S`, a later one removes values that
    have been marked for the given age. Values that the end of a group names for removal are thus left to the collector.
    Passes of several fronts add up without any state but the keys'. No other value ever expires.
  * Redis visits a bounded number of keys per call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.connection import Argument
from rollmesh.buffer.store.drafts import DraftRef, parse_draft_refs
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.payloads import PayloadRef, name_of, parse_payload_refs

# Seconds after which an unowned value is gone, even if no pass comes back to it.
_MARK_S = 3600
_PORTION = 500
# Pause between two portions, so that the walk takes little time from other commands.
_PAUSE_S = 0.02
_NAME = re.compile(
    r"(?P<member>\d+):(?:(?P<attempt>\d+):(?P<digest>[0-9a-f]{16})(?::(?P<piece>\d+))?"
    r"|d(?P<of_draft>\d+)-(?P<tokens>\d+)-(?P<draft>[0-9a-f]{16}))"
)


class _Value(NamedTuple):
    """A payload, or one of its pieces."""

    member: int
    attempt: int
    name: str
    piece: int | None


@dataclass(frozen=True, slots=True)
class GroupOwnership:
    """A live group: `done` has one character per member."""

    attempt: int
    done: str
    payloads: tuple[PayloadRef, ...]
    drafts: tuple[DraftRef, ...]

    @classmethod
    def from_reply(cls, reply: Sequence[Any]) -> GroupOwnership:
        attempt, done, payloads, drafts = reply
        return cls(int(attempt), done.decode(), parse_payload_refs(payloads), parse_draft_refs(drafts))

    def may_own(self, name: str) -> bool:
        """True if a value (`member:attempt:digest`, a piece or a draft) belongs to the group, or still may."""
        value = _parse(name)
        if value is None or value.member >= len(self.done):
            return False
        is_open = self.done[value.member] == "0" and value.attempt == self.attempt
        if isinstance(value, DraftRef):
            longer = (d for d in self.drafts if d[:2] == value[:2] and d.tokens >= value.tokens)
            return value in self.drafts or (is_open and not any(longer))
        stored = next((ref for ref in self.payloads if ref.name == value.name), None)
        if stored is None:
            return is_open
        return value.piece is None if not stored.pieces else value.piece is not None and value.piece < stored.pieces


def _parse(name: str) -> _Value | DraftRef | None:
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    if found["draft"] is not None:
        return DraftRef(int(found["member"]), int(found["of_draft"]), int(found["tokens"]), found["draft"])
    piece = None if found["piece"] is None else int(found["piece"])
    member, attempt = int(found["member"]), int(found["attempt"])
    return _Value(member, attempt, name_of(member, attempt, found["digest"]), piece)


async def sweep_unowned_values(
    access: RedisAccess, keys: Keys, table: str, *, age_s: float, pause_s: float = _PAUSE_S
) -> int:
    """Passes once over a table's stored values; returns the number of removed ones.

    Args:
        age_s: an unowned value is removed once it has been known as one for so long.

    Raises:
        StoreError: Redis failed; a later pass continues.
    """
    swept = 0
    of_groups = keys.payload(table, "", "", "").removesuffix("::")
    async for portion in _in_portions(access.scan(f"{_escape_glob(of_groups)}*", _PORTION)):
        unowned = await _unowned_values(access, table, of_groups, portion)
        swept += await _remove(access, keys, table, unowned, age_s)
        await asyncio.sleep(pause_s)
    of_prompts = keys.prompt(table, "")
    async for portion in _in_portions(access.scan(f"{_escape_glob(of_prompts)}*", _PORTION)):
        unowned = await _unowned_prompts(access, keys, table, of_prompts, portion)
        swept += await _remove(access, keys, table, unowned, age_s)
        await asyncio.sleep(pause_s)
    return swept


async def _remove(access: RedisAccess, keys: Keys, table: str, unowned: Sequence[str], age_s: float) -> int:
    """Marks unowned values, or removes those marked `age_s` ago; returns how many were removed."""
    ages = await access.batch([("PTTL", key) for key in unowned])
    commands: list[tuple[Argument, ...]] = []
    for key, left_ms in zip(unowned, ages, strict=True):
        if left_ms == -1:
            commands.append(("EXPIRE", key, _MARK_S))
        elif 0 <= left_ms <= (_MARK_S - age_s) * 1000:
            commands.append(("UNLINK", key))
    replies = await access.batch(commands)
    removed = sum(reply for command, reply in zip(commands, replies, strict=True) if command[0] == "UNLINK")
    if removed:
        await access.batch([("HINCRBY", keys.table(table), "orphans_swept", removed)])
    return removed


async def _unowned_values(access: RedisAccess, table: str, prefix: str, found: Sequence[bytes]) -> list[str]:
    named = [(key, *key.removeprefix(prefix).partition(":")[::2]) for key in map(bytes.decode, found)]
    group_ids = list(dict.fromkeys(group_id for _, group_id, _ in named))
    answer = await access.run_script("value_owners", table, *group_ids)
    owners = {gid: GroupOwnership.from_reply(reply) for gid, reply in zip(group_ids, answer[2], strict=True) if reply}
    return [key for key, gid, name in named if gid not in owners or not owners[gid].may_own(name)]


async def _unowned_prompts(
    access: RedisAccess, keys: Keys, table: str, prefix: str, found: Sequence[bytes]
) -> list[str]:
    names = [(key, *key.removeprefix(prefix).partition(":")[::2]) for key in map(bytes.decode, found)]
    # In this order: what was seeded before is named from then on, or never.
    seeded = (await access.run_script("read_table", table))[2]
    digests = await access.mget([keys.digest(table, ordinal) for _, ordinal, _ in names])
    return [
        key
        for (key, ordinal, digest), named in zip(names, digests, strict=True)
        if not ordinal.isdigit() or (int(ordinal) <= seeded and (named or b"").decode() != digest)
    ]


async def _in_portions(found: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    portion: list[bytes] = []
    async for key in found:
        portion.append(key)
        if len(portion) == _PORTION:
            yield portion
            portion = []
    if portion:
        yield portion


def _escape_glob(text: str) -> str:
    """Escapes the characters that SCAN would take for a pattern."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)
