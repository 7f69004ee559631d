"""Texts of others, bounded where they enter: reasons, errors, names."""

from __future__ import annotations

# Why a member of a group is not scored, or a group was dropped: kept with it, and counted under it.
REASON_CHARACTERS = 300
# Why a service waits: each heartbeat carries it.
WAITING_CHARACTERS = 1000


def bounded(text: str, limit: int) -> str:
    """The beginning of a text, in at most `limit` characters; where some are left out, its end says how many it has."""
    if len(text) <= limit:
        return text
    mark = f" ... ({len(text)} characters)"
    return text[: max(0, limit - len(mark))] + mark
