"""The responses that wait for a job.

Invariants: they start in the order of their arrival. While a swap of weights waits for pinned ones only such start.
Interrupted ones stand before those that never started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from rollmesh.generators.engines.external.request_state import RequestState


class WaitingQueue:
    """The queue of an engine."""

    def __init__(self) -> None:
        self._queue: deque[RequestState] = deque()
        self._pinned = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, responses: Iterable[RequestState]) -> None:
        """Appends new ones."""
        for response in responses:
            self._queue.append(response)
            self._pinned += response.request.pinned

    def put_back(self, interrupted: Sequence[RequestState]) -> None:
        """Puts responses that had jobs at the head, in this order."""
        self._queue.extendleft(reversed(interrupted))
        self._pinned += sum(response.request.pinned for response in interrupted)

    def pop_next(self, *, pinned_only: bool) -> RequestState | None:
        """Removes and returns the next that may start; None where none may."""
        if not self._queue or (pinned_only and not self._pinned):
            return None
        if not pinned_only:
            response = self._queue.popleft()
        else:
            response = next(waiting for waiting in self._queue if waiting.request.pinned)
            self._queue.remove(response)
        self._pinned -= response.request.pinned
        return response

    def remove(self, responses: Sequence[RequestState]) -> None:
        """Removes those of them that wait."""
        removed = {id(response) for response in responses}
        kept = deque(waiting for waiting in self._queue if id(waiting) not in removed)
        if len(kept) != len(self._queue):
            self._queue = kept
            self._pinned = sum(waiting.request.pinned for waiting in kept)
