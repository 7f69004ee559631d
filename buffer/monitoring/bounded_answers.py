"""Read-only answers within the deadline of their call, so that the caller gets the reason for a missing one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from rollmesh.mesh.errors import StoreError

T = TypeVar("T")
# Share of the caller's deadline; the rest is for the answer's way back.
_SHARE = 0.8
_WITHOUT_DEADLINE_S = 30.0


async def within_deadline(reading: Awaitable[T], context: Any) -> T:
    """Awaits a reading of Redis well within the deadline of the call.

    Args:
        reading: reads only; it is cancelled when the time is over.
        context: of the call.

    Raises:
        StoreError: Redis does not answer, or the reading fails for another reason.
    """
    left = context.time_remaining()
    patience_s = _SHARE * (_WITHOUT_DEADLINE_S if left is None else left)
    try:
        async with asyncio.timeout(patience_s):
            return await reading
    except TimeoutError as error:
        raise StoreError(
            f"the front is there, but its Redis has not answered for {patience_s:.1f} s",
            hint="is it stopped, or its disk or link slow? the run's own Redis is restarted automatically if frozen",
        ) from error
