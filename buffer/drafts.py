"""Drafts: the payload so far of members that are not finished, so that a lost generator loses little.

Invariants
  * A draft is a plain key beside the payloads, named by its attempt and its length. The first value of a name wins,
    except over one that no verb has noted: what is noted of a draft (its length, its versions) is true of its bytes.
  * The verb decides which draft counts: the longest of the latest attempt. What it replaces, refuses or drops is
    removed; what nobody names is swept.
  * A draft never counts in the ledger, in the bytes or in a deadline, until it is handed to a new holder: from then on
    the versions of its tokens are the group's.
"""

from __future__ import annotations

from typing import NamedTuple

from buffer.keys import Keys
from buffer.payloads import SetValue, set_whole
from buffer.redis_access import RedisAccess


class DraftPlace(NamedTuple):
    """Names a draft: the member, the attempt that wrote it, and its response tokens."""

    member: int
    attempt: int
    tokens: int


def draft_places(text: bytes | str) -> tuple[DraftPlace, ...]:
    """Parses what the verbs note of drafts: `member:attempt:tokens,...`."""
    plain = text.decode() if isinstance(text, bytes) else text
    return tuple([DraftPlace(*map(int, part.split(":"))) for part in plain.split(",")]) if plain else ()


class Drafts:
    """Reads and writes draft values of one run.

    Args:
        access: Redis.
        keys: names.
    """

    def __init__(self, access: RedisAccess, keys: Keys) -> None:
        self._redis = access
        self._keys = keys

    def key(self, table: str, group_id: str, place: DraftPlace) -> str:
        """The key of one draft."""
        return self._keys.payload(table, group_id, place.member, f"d{place.attempt}-{place.tokens}")

    def keys_of(self, table: str, group_id: str, text: bytes | str) -> list[str]:
        """Keys of what the verbs noted of a group's drafts."""
        return [self.key(table, group_id, place) for place in draft_places(text)]

    def set(self, table: str, group_id: str, place: DraftPlace, payload: bytes) -> SetValue:
        """The command that stores a draft."""
        return set_whole(self.key(table, group_id, place), payload)

    async def read(self, table: str, group_id: str, place: DraftPlace) -> bytes | None:
        """The payload of a draft; None where it is gone."""
        (payload,) = await self._redis.mget([self.key(table, group_id, place)])
        return payload
