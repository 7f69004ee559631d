"""A bounded queue between a thread that must not wait and one that works its jobs off."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class JobQueue(Generic[Job]):
    """Jobs in order; all methods may be called from any thread.

    Args:
        limit: jobs that wait at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Job) -> bool:
        """Adds a job, without waiting; False where the queue is full or closed."""
        with self._changed:
            if self._is_closed or len(self._jobs) >= self._limit:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def get(self) -> Job | None:
        """The next job, once there is one; None after the last job of a closed queue."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            return self._jobs.popleft() if self._jobs else None

    def close(self, *, drop: bool = False) -> None:
        """Takes no more jobs.

        Args:
            drop: those that wait are not given out either.
        """
        with self._changed:
            self._is_closed = True
            if drop:
                self._jobs.clear()
            self._changed.notify_all()

    def wait_closed(self, timeout_s: float) -> bool:
        """True once the queue is closed; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed, timeout_s)
