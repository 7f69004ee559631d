"""The Admit streams of one table that are open at one front: each is woken for what concerns its own member.

Waking all of them for every change would cost each change as much as there are streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Wake = Callable[[], None]


class OpenStreams:
    """Streams by member; for a moment a member may have two, of which one has been replaced."""

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
