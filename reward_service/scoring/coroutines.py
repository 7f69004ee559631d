"""Runs coroutine reward functions of this very program on an event loop of their own.

A user's coroutine may block its loop by mistake; that must not stop the service's heartbeats and other calls. A
loop that does not answer is given up and replaced. (Functions named by path run in `reward_service.workers`.)

Invariant: every call ends in its outcomes, in `Failed("timeout")`, or as not begun, by the deadline and a short grace.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.outcomes import Failed, Outcome, not_begun

log = logging.getLogger(__name__)
Start = Callable[[], Coroutine[Any, Any, list[Outcome]]]

# Coroutines of one request that run together.
_MAX_CONCURRENT = 256
# Seconds that a live loop gets to report its own time-outs before it counts as blocked.
_GRACE_S = 0.1


class CoroutinePool:
    """A lazily started event loop for coroutine functions."""

    def __init__(self) -> None:
        self._bridge: AsyncBridge | None = None

    async def run(
        self, starts: Sequence[Start], *, call_timeout_s: float, times: CallTimes
    ) -> list[list[Outcome] | Failed]:
        """Runs calls together.

        Args:
            call_timeout_s: seconds that one call may take.
            times: until when calls may be begun, and by when all must be done.

        Returns:
            per call its outcomes, or the `Failed` of one that was not done in time.
        """
        blocked = Failed("timeout", "the function blocks its event loop", retryable=True)
        answers: list[list[Outcome] | Failed] = [blocked] * len(starts)
        gate = asyncio.Semaphore(_MAX_CONCURRENT)

        async def run_one(index: int) -> None:
            try:
                async with asyncio.timeout(times.begin_by - time.monotonic()):
                    await gate.acquire()
            except TimeoutError:
                answers[index] = not_begun(f"{_MAX_CONCURRENT} others are under way")
                return
            try:
                async with asyncio.timeout(min(call_timeout_s, times.deadline - time.monotonic())):
                    answers[index] = await starts[index]()
            except TimeoutError:
                overdue = time.monotonic() >= times.deadline
                why = "the call's deadline passed" if overdue else f"no answer within {call_timeout_s:g} s"
                answers[index] = Failed("timeout", why, retryable=True)
            finally:
                gate.release()

        async def run_all() -> None:
            await asyncio.gather(*(run_one(index) for index in range(len(starts))))

        if self._bridge is None:
            self._bridge = AsyncBridge("scorer-loop")
        bridge = self._bridge
        future = asyncio.wrap_future(bridge.submit(run_all()))
        longest = min(times.deadline - time.monotonic(), call_timeout_s * -(-len(starts) // _MAX_CONCURRENT))
        done, _ = await asyncio.wait((future,), timeout=max(0.0, longest) + _GRACE_S)
        if not done:
            future.cancel()
            log.warning("a coroutine reward function blocks its event loop; the loop is abandoned")
            if self._bridge is bridge:
                self._bridge = None
        return list(answers)

    def close(self) -> None:
        """Cancels running calls and ends the loop."""
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None
