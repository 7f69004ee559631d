"""Notifications inside one front: an event for every waiter is set when a table's snapshot changes.

A notification is a hint only. Waiters read the snapshot themselves, and at bounded intervals without a notification.
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
        """Wakes all subscribers of the table."""
        for event in self._waiting.get(table, ()):
            event.set()

    @contextmanager
    def subscribe(self, table: str) -> Iterator[asyncio.Event]:
        """An event that every notification sets; the subscriber clears it."""
        event = asyncio.Event()
        subscribers = self._waiting.setdefault(table, set())
        subscribers.add(event)
        try:
            yield event
        finally:
            subscribers.discard(event)


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
