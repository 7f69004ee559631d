"""Requests in progress at a time, in the order in which they came; their number may change."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slots:
    """Places for requests, on one event loop.

    Args:
        most: how many there are at present, at least 1.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Waits for a place, and takes it."""
        if not self._waiting and self._taken < self._most():
            self._taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Gives a place back: to those who wait, as many as there are places."""
        self._taken -= 1
        while self._waiting and self._taken < self._most():
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
