"""Wake-ups inside one front: whoever waits for a table's figures to change holds an event that rings.

A ring is a hint only. Waiters look at the figures themselves, and at bounded intervals without any ring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ChangeNotifier:
    """Events by table."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def notify(self, table: str) -> None:
        """Wakes all who listen to the table."""
        for event in self._waiting.get(table, ()):
            event.set()

    @contextmanager
    def subscribe(self, table: str) -> Iterator[asyncio.Event]:
        """An event that is set at every ring; the listener clears it."""
        event = asyncio.Event()
        listeners = self._waiting.setdefault(table, set())
        listeners.add(event)
        try:
            yield event
        finally:
            listeners.discard(event)


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for an event; False after `timeout_s`."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
