"""Drafts: the payload so far of members that are not finished, so that a lost generator loses little.

Invariants
  * A draft is a plain key next to the payloads, named by its attempt, its length and the digest of its bytes. So the
    notes on a draft (its length, its versions) are true of its bytes.
  * The script decides which draft counts: the longest of the latest attempt. A draft that it replaces, refuses or drops
    is removed; one that no group names is swept.
  * A draft never counts in the ledger, in the bytes or in a deadline, until it is handed to a new holder. From then on
    the versions of its tokens are the group's.
"""

from __future__ import annotations

from typing import NamedTuple

from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.store.keys import Keys


class DraftRef(NamedTuple):
    """Names a draft: the member, the attempt that wrote it, its response tokens, and the digest of its payload."""

    member: int
    attempt: int
    tokens: int
    digest: str


def parse_draft_refs(text: bytes | str) -> tuple[DraftRef, ...]:
    """Parses the scripts' notes of drafts: `member:attempt:tokens:digest,...`."""
    plain = text.decode() if isinstance(text, bytes) else text
    return tuple([_parse_ref(*part.split(":")) for part in plain.split(",")]) if plain else ()


def _parse_ref(member: str, attempt: str, tokens: str, digest: str) -> DraftRef:
    return DraftRef(int(member), int(attempt), int(tokens), digest)


class Drafts:
    """Reads and writes draft values of one run.

    Args:
        access: Redis.
        keys: names.
    """

    def __init__(self, access: RedisAccess, keys: Keys) -> None:
        self._redis = access
        self._keys = keys

    def key(self, table: str, group_id: str, draft: DraftRef) -> str:
        """The key of one draft."""
        return self._keys.payload(table, group_id, draft.member, f"d{draft.attempt}-{draft.tokens}-{draft.digest}")

    def keys_of(self, table: str, group_id: str, text: bytes | str) -> list[str]:
        """Keys in the scripts' notes of a group's drafts."""
        return [self.key(table, group_id, draft) for draft in parse_draft_refs(text)]

    async def read(self, table: str, group_id: str, draft: DraftRef) -> bytes | None:
        """The payload of a draft; None where it is gone."""
        (payload,) = await self._redis.mget([self.key(table, group_id, draft)])
        return payload
