"""Threads that run synchronous reward functions of this very program, each call under its own deadline.

A Python thread cannot be ended from outside. So a thread whose call is overdue is given up: its job is closed, a
fresh thread takes its place, and whatever the late call returns is dropped. A call that never lets go of the
interpreter stops its whole process: only functions that cannot leave it run here (see `reward_service.workers`).

Invariants: every call of a job ends in its results or in `Failed("timeout")`, at its deadline at the latest; a late
result is never used; at most `max_lost` given-up threads exist at a time, after which jobs wait for a free one (and
fail at their deadlines).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from reward_service.outcomes import Failed, Outcome

log = logging.getLogger(__name__)
Work = Callable[[], list[Outcome]]


class _Job:
    """Calls that one thread runs in order. All fields below `lock` are guarded by it."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._works = works
        self._lock = threading.Lock()
        self._results: list[list[Outcome]] = []
        self._running_since: float | None = None
        self._closed = False

    @property
    def running_since(self) -> float | None:
        """Monotonic time at which the present call began; None before the first."""
        with self._lock:
            return self._running_since

    def run(self) -> bool:
        """Called by a thread. False where the job was closed under it: the thread has been replaced."""
        for work in self._works:
            with self._lock:
                if self._closed:
                    return self._running_since is None
                self._running_since = time.monotonic()
            outcomes = work()
            with self._lock:
                if self._closed:
                    return False
                self._results.append(outcomes)
        with self._lock:
            if not self._closed:  # its loop may be gone otherwise
                self._loop.call_soon_threadsafe(self._finish)
        return True

    def close(self) -> tuple[list[list[Outcome]], bool]:
        """Ends the job: its results so far, and whether a thread was inside a call."""
        with self._lock:
            self._closed = True
            inside = self._running_since is not None and len(self._results) < len(self._works)
            return self._results, inside

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class ThreadPool:
    """`size` threads for synchronous reward functions."""

    def __init__(self, size: int, *, max_lost: int = 16) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._max_lost = max_lost
        self._lock = threading.Lock()
        self._size = size
        self._alive = 0
        self._lost = 0
        self._closed = False
        self._refill()

    @property
    def size(self) -> int:
        """Threads that take jobs when none is given up."""
        return self._size

    @property
    def lost(self) -> int:
        """Given-up threads that still run."""
        with self._lock:
            return self._lost

    async def run(
        self, works: Sequence[Work], *, call_timeout_s: float, deadline: float
    ) -> list[list[Outcome] | Failed]:
        """Runs calls one after another in one thread.

        Args:
            call_timeout_s: seconds that one call may take.
            deadline: monotonic time by which all must be done.

        Returns:
            per call its outcomes, or the `Failed` of one that was not done in time.
        """
        results: list[list[Outcome] | Failed] = []
        while len(results) < len(works):
            job = _Job(works[len(results) :])
            self._jobs.put(job)
            try:
                finished = await _watched(job, call_timeout_s, deadline)
            finally:
                done, inside = job.close()
                if inside:
                    self._give_up()
            results.extend(done)
            if finished:
                break
            if time.monotonic() >= deadline:
                late = Failed("timeout", f"the call's deadline passed{self._describe()}", retryable=True)
                results.extend([late] * (len(works) - len(results)))
            elif inside:
                results.append(Failed("timeout", f"no answer within {call_timeout_s:g} s", retryable=True))
        return results

    def close(self) -> None:
        """Lets the threads end; calls that hang are left to the end of the process (the threads are daemons)."""
        with self._lock:
            self._closed = True
            alive = self._alive
        for _ in range(alive):
            self._jobs.put(None)

    def _describe(self) -> str:
        lost = self.lost
        return f" ({lost} reward calls hang in this process)" if lost else ""

    def _give_up(self) -> None:
        with self._lock:
            self._alive -= 1
            self._lost += 1
            lost = self._lost
        log.warning("a reward call did not end in time; its thread is given up", extra={"lost": lost})
        self._refill()

    def _refill(self) -> None:
        with self._lock:
            missing = 0 if self._closed or self._lost >= self._max_lost else self._size - self._alive
            self._alive += missing
        for _ in range(missing):
            threading.Thread(target=self._work, name="scorer", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.run():
                with self._lock:
                    self._lost -= 1
                self._refill()
                return


async def _watched(job: _Job, call_timeout_s: float, deadline: float) -> bool:
    """Waits until the job is done (True), or its present call or the whole is overdue (False)."""
    while True:
        now = time.monotonic()
        since = job.running_since
        limit = min(deadline, (now if since is None else since) + call_timeout_s)
        if limit <= now:
            return job.done.done()
        await asyncio.wait((job.done,), timeout=limit - now)
        if job.done.done():
            return True
