"""Runs coroutine reward functions of this very program on an event loop of their own.

A user's coroutine may block its loop by mistake; that must not stop the service's heartbeats and other calls. A
loop that does not answer is given up and replaced. (Functions named by path run in `reward_service.workers`.)

Invariant: every call ends in its outcomes, in `Failed("timeout")`, or as not begun, by the deadline and a short grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.outcomes import Failed, OnAnswer, Outcome, not_begun

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
        self, starts: Sequence[Start], *, call_timeout_s: float, times: CallTimes, on_answer: OnAnswer
    ) -> None:
        """Runs calls together; those that run end where this is cancelled.

        Args:
            call_timeout_s: seconds that one call may take.
            times: until when calls may be begun, and by when all must be done.
            on_answer: gets each call's answer as soon as it is there; all of them before this returns.
        """
        blocked = Failed("timeout", "the function blocks its event loop", retryable=True)
        gate = asyncio.Semaphore(_MAX_CONCURRENT)
        waiting = set(range(len(starts)))
        here = asyncio.get_running_loop()

        def deliver(index: int, answer: list[Outcome] | Failed) -> None:
            if index in waiting:
                waiting.remove(index)
                on_answer(index, answer)

        def answer_from_there(index: int, answer: list[Outcome] | Failed) -> None:
            # The loop that waits here may be closed by now.
            with contextlib.suppress(RuntimeError):
                here.call_soon_threadsafe(deliver, index, answer)

        async def run_one(index: int) -> None:
            try:
                async with asyncio.timeout(times.begin_by - time.monotonic()):
                    await gate.acquire()
            except TimeoutError:
                answer_from_there(index, not_begun(f"{_MAX_CONCURRENT} others are under way"))
                return
            try:
                async with asyncio.timeout(min(call_timeout_s, times.deadline - time.monotonic())):
                    answer_from_there(index, await starts[index]())
            except TimeoutError:
                overdue = time.monotonic() >= times.deadline
                why = "the call's deadline passed" if overdue else f"no answer within {call_timeout_s:g} s"
                answer_from_there(index, Failed("timeout", why, retryable=True))
            finally:
                gate.release()

        async def run_all() -> None:
            await asyncio.gather(*(run_one(index) for index in range(len(starts))))

        if self._bridge is None:
            self._bridge = AsyncBridge("scorer-loop")
        bridge = self._bridge
        future = asyncio.wrap_future(bridge.submit(run_all()))
        longest = min(times.deadline - time.monotonic(), call_timeout_s * -(-len(starts) // _MAX_CONCURRENT))
        try:
            done, _ = await asyncio.wait((future,), timeout=max(0.0, longest) + _GRACE_S)
        finally:
            future.cancel()
        if not done:
            log.warning("a coroutine reward function blocks its event loop; the loop is abandoned")
            if self._bridge is bridge:
                self._bridge = None
        # The answers of a loop that lives have come before its end.
        for index in sorted(waiting):
            deliver(index, blocked)

    def close(self) -> None:
        """Cancels running calls and ends the loop."""
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None
