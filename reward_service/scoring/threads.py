"""Threads that run synchronous reward functions of this very program, each call under its own deadline.

A Python thread cannot be ended from outside. So a thread with an overdue call is given up. Its job is closed, a fresh
thread takes its place, and whatever the late call returns is dropped. A call that never releases the interpreter
stops its whole process: only functions that cannot leave it run here (see `reward_service.workers`).

Invariants: every call of a job ends in its results, in `Failed("timeout")`, or as not begun, at the deadline at the
latest. A late result is never used. At most `max_lost` given-up threads exist at a time; then jobs wait for a free one
(and fail at their deadlines).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import membership_pb2
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.outcomes import Failed, OnAnswer, Outcome, not_begun

log = logging.getLogger(__name__)
Work = Callable[[], list[Outcome]]
# Seconds after which a job's answers are reported while it continues; each wait is twice as long, up to the longest.
_REPORT_S, _LONGEST_REPORT_S = 0.02, 0.5


class _Job:
    """Calls that one thread runs in order, as long as they may be begun. All fields below `lock` are guarded by it.

    Args:
        first: place of the first call.
        on_answer: gets the answers, in the event loop's thread.
    """

    def __init__(self, works: Sequence[Work], begin_by: float, first: int, on_answer: OnAnswer) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._works = works
        self._begin_by = begin_by
        self._place = first
        self._on_answer = on_answer
        self._lock = threading.Lock()
        self._results: list[list[Outcome]] = []
        self._running_since: float | None = None
        self._closed = False

    @property
    def running_since(self) -> float | None:
        """Monotonic time at which the present call began; None between calls."""
        with self._lock:
            return self._running_since

    def run(self) -> bool:
        """Runs the calls in a pool's thread; False if the job was closed meanwhile: the thread was replaced then."""
        for work in self._works:
            with self._lock:
                if self._closed:
                    return self._running_since is None
                if time.monotonic() >= self._begin_by:
                    break
                self._running_since = time.monotonic()
            outcomes = work()
            with self._lock:
                if self._closed:
                    return False
                self._results.append(outcomes)
                self._running_since = None
        with self._lock:
            if not self._closed:  # its loop may be gone otherwise
                self._loop.call_soon_threadsafe(self._finish)
        return True

    def close(self) -> tuple[int, bool]:
        """Ends the job and reports its results so far: the place after them, and whether a thread was inside a call."""
        with self._lock:
            self._closed = True
            inside = self._running_since is not None
        self.report()
        return self._place, inside

    def report(self) -> None:
        """Gives the results since the last report to the receiver; in the event loop's thread."""
        with self._lock:
            fresh, self._results = self._results, []
        for outcomes in fresh:
            self._on_answer(self._place, outcomes)
            self._place += 1

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

    def present_wait(self) -> Wait:
        """The reason why calls wait: too many hang, so threads are not replaced; empty while they are."""
        lost = self.lost
        if lost < self._max_lost:
            return NO_WAIT
        return Wait(f"{lost} reward calls hang in this process", membership_pb2.WAIT_CAUSE_REWARD_OVERDUE)

    async def run(self, works: Sequence[Work], *, call_timeout_s: float, times: CallTimes, on_answer: OnAnswer) -> None:
        """Runs calls one after another in one thread.

        Args:
            call_timeout_s: seconds that one call may take.
            times: until when calls may be begun, and by when all must be done.
            on_answer: gets the answers of calls, in their order, those that take longer as soon as they are there. All
                come before this returns.
        """
        place = 0
        while place < len(works):
            job = _Job(works[place:], times.begin_by, place, on_answer)
            self._jobs.put(job)
            try:
                await _watched(job, call_timeout_s, times)
            finally:
                place, inside = job.close()
                if inside:
                    self._abandon_thread()
            if not inside:
                break
            late = time.monotonic() >= times.deadline
            why = "the call's deadline passed: it began late" if late else f"no answer within {call_timeout_s:g} s"
            on_answer(place, Failed("timeout", why, retryable=True))
            place += 1
        for left in range(place, len(works)):
            on_answer(left, self._not_begun())

    def close(self) -> None:
        """Lets the threads end; calls that hang are left to the end of the process (the threads are daemons)."""
        with self._lock:
            self._closed = True
            alive = self._alive
        for _ in range(alive):
            self._jobs.put(None)

    def _not_begun(self) -> Failed:
        if wait := self.present_wait():
            return Failed("timeout", f"the call's deadline passed ({wait.reason})", retryable=True)
        return not_begun(f"{self._size} threads are busy (reward.workers)")

    def _abandon_thread(self) -> None:
        with self._lock:
            self._alive -= 1
            self._lost += 1
            lost = self._lost
        log.warning("a reward call did not end in time; its thread is abandoned", extra={"lost": lost})
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


async def _watched(job: _Job, call_timeout_s: float, times: CallTimes) -> None:
    """Waits until the job is done, its present call is overdue, or it is too late to begin another."""
    pause = _REPORT_S
    while not job.done.done():
        now = time.monotonic()
        since = job.running_since
        limit = times.begin_by if since is None else min(times.deadline, since + call_timeout_s)
        if limit <= now:
            return
        # No event reports a beginning: no call is overdue sooner than this.
        limit = min(limit, now + call_timeout_s, now + pause)
        await asyncio.wait((job.done,), timeout=limit - now)
        job.report()
        pause = min(2 * pause, _LONGEST_REPORT_S)
