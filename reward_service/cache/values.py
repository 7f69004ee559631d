"""Outcomes as the cache keeps them. Errors are not kept, and a value that is none of ours is no value."""

from __future__ import annotations

import math
from dataclasses import replace

from rollmesh.reward_service.outcomes import Scored, Unscorable
from rollmesh.reward_service.workers.messages import pack_answer, unpack_answer


def pack(outcome: Scored | Unscorable) -> bytes:
    """An outcome as bytes. As it is found later, it costs nothing, and says that it was found."""
    return pack_answer([replace(outcome, cost=0.0, cached=True) if isinstance(outcome, Scored) else outcome])


def unpack(value: bytes) -> Scored | Unscorable | None:
    """The outcome again; None for bytes that someone else has written."""
    try:
        (outcome,) = unpack_answer(value)
    except Exception:  # noqa: BLE001 - bytes of others may break the reader in any way
        return None
    if isinstance(outcome, Scored):
        values = outcome.total, *outcome.components.values(), *outcome.per_token, *(span[2] for span in outcome.spans)
        return outcome if all(map(math.isfinite, values)) else None
    return outcome if isinstance(outcome, Unscorable) else None
