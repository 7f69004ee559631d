"""A clock that stands still while the generator sleeps: what waits for the engine then is neither slow nor stuck."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class AwakeClock:
    """Seconds of the event loop's clock, without those that were slept.

    Args:
        asleep: it stands still from the start.
    """

    def __init__(self, *, asleep: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._slept_s = 0.0
        self._stopped_at = self._loop.time() if asleep else None
        self._changed = asyncio.Event()

    def time(self) -> float:
        """The present time."""
        now = self._loop.time() if self._stopped_at is None else self._stopped_at
        return now - self._slept_s

    @property
    def slept_s(self) -> float:
        """Seconds for which it has stood still."""
        return self._loop.time() - self.time()

    @property
    def stopped(self) -> bool:
        """It stands still."""
        return self._stopped_at is not None

    def stop(self) -> None:
        """Stops; a second call does nothing."""
        if self._stopped_at is None:
            self._stopped_at = self._loop.time()
            self._notify()

    def go(self) -> None:
        """Continues; a second call does nothing."""
        if self._stopped_at is not None:
            self._slept_s += self._loop.time() - self._stopped_at
            self._stopped_at = None
            self._notify()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep` by this clock."""
        end = self.time() + seconds
        while (left := end - self.time()) > 0:
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left if self._stopped_at is None else None)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """`asyncio.timeout` by this clock.

        Raises:
            TimeoutError: the block has taken so many seconds.
        """
        async with asyncio.timeout(None) as limit:
            timer = asyncio.create_task(self._expire(limit, seconds))
            try:
                yield
            finally:
                timer.cancel()

    async def _expire(self, limit: asyncio.Timeout, seconds: float) -> None:
        await self.sleep(seconds)
        limit.reschedule(self._loop.time())

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
