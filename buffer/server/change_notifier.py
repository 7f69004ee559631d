"""Notifications inside one front: an event for every waiter is set when a table's snapshot changes.

A notification is a hint only. Waiters read the snapshot themselves, and at bounded intervals without a notification.
Admit streams are so many that each is woken for its own member alone (`OpenStreams`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Wake = Callable[[], None]


class ChangeNotifier:
    """Events by table."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def notify(self, table: str) -> None:
        """Wakes all subscribers of the table."""
        for event in self._waiting.get(table, ()):
            event.set()

    @contextmanager
    def subscribe(self, *tables: str) -> Iterator[asyncio.Event]:
        """An event that every notification of these tables sets; the subscriber clears it."""
        event = asyncio.Event()
        for table in tables:
            self._waiting.setdefault(table, set()).add(event)
        try:
            yield event
        finally:
            for table in tables:
                self._waiting[table].discard(event)


class OpenStreams:
    """Streams of one table by member; for a moment a member may have two, of which one has been replaced.

    Waking all of them for every change would cost each change as much as there are streams.
    """

    def __init__(self) -> None:
        self._by_member: dict[str, list[Wake]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Number of streams."""
        return self._count

    @contextmanager
    def opened(self, member_id: str, on_cancellation: Wake) -> Iterator[None]:
        """Counts a stream while it is open.

        Args:
            on_cancellation: called when groups of the member may not be needed any more.
        """
        self._by_member.setdefault(member_id, []).append(on_cancellation)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            streams = self._by_member[member_id]
            streams.remove(on_cancellation)
            if not streams:
                del self._by_member[member_id]

    def wake(self, member_ids: Iterable[str]) -> None:
        """Wakes the streams of these members; those that are open elsewhere are ignored."""
        for member_id in member_ids:
            for on_cancellation in self._by_member.get(member_id, ()):
                on_cancellation()

    def wake_all(self) -> None:
        """Wakes every stream: what has been cancelled is not known."""
        self.wake(list(self._by_member))


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
