"""A slot of one worker process: starts it, feeds it, judges it, replaces it.

Invariants
  * A unit is answered by its own outcomes or by `Failed`. It has failed if it kept its worker past its time (timeout),
    or if its worker died and never had another unit (crashed).
  * Every other unit of an ended worker returns to the queue; those that may have ended it are tried with more care.
    So a timer, a thread or a closed descriptor that one unit leaves harms no other.
  * A worker that is overdue, or has lost its connection, is killed with its process group before its successor starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import dataclass
from typing import Protocol

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.outcomes import Failed
from rollmesh.reward_service.workers.calls import CLOSED, Trial, Unit
from rollmesh.reward_service.workers.process import Ending, WorkerProcess

log = logging.getLogger(__name__)

# Seconds of a unit after which those that wait for it in the same worker are given to others.
_STUCK_S = 0.25
# Seconds that a message may take on its way, beyond the time of the call itself.
_GRACE_S = 0.5
# Seconds by which a check may come late before it judges no worker.
_ABSENT_S = 2.0


class UnitSource(Protocol):
    """The part of a queue that a slot uses."""

    call_timeout_s: float
    concurrent: bool

    async def open_worker(self) -> WorkerProcess:
        """A worker that has loaded its functions.

        Raises:
            RewardError: it cannot be had.
        """
        ...

    def name(self, function: int) -> str:
        """A function's name."""
        ...

    def next_units(self, held: int, *, new: bool) -> list[Unit]:
        """Units of one function for a worker that holds `held` units, or is new; none if none waits."""
        ...

    def requeue(self, units: list[Unit]) -> None:
        """Queues units before all that wait, for another worker."""
        ...

    def store_verdict(self, unit: Unit, verdict: Failed) -> None:
        """Stores a verdict that came after its call's deadline, for the next call that asks the same.

        Otherwise items that hang would be begun again and again, and take the workers from all others.
        """
        ...

    def record_duration(self, function: int, seconds: float, units: int) -> None:
        """Records how long some units of a function took together."""
        ...

    def record_end(self, why: str, *, overdue: bool, function: int | None = None) -> None:
        """Records that a worker died, or was ended for being overdue; `function`: the one with the overdue call."""
        ...


@dataclass(slots=True)
class _Sent:
    """A unit that the worker holds."""

    unit: Unit
    at: float


class Slot:
    """Runs one worker process at a time, on units of a source."""

    def __init__(self, source: UnitSource) -> None:
        self._source = source
        self._wake = asyncio.Event()
        self._sent: dict[int, _Sent] = {}
        self._tickets = 0
        # The present worker's first.
        self._first = 0
        self._worker: WorkerProcess | None = None
        self._judged_from = 0.0

    @property
    def idle(self) -> bool:
        """True if it has a worker without units."""
        return self._worker is not None and not self._sent

    @property
    def pid(self) -> int | None:
        """Process id of the present worker."""
        return self._worker.pid if self._worker is not None else None

    def wake(self) -> None:
        """Makes it check the queue."""
        self._wake.set()

    async def run(self, worker: WorkerProcess | None = None) -> None:
        """Works until cancelled.

        Args:
            worker: the first one, if there is one already.
        """
        try:
            await self._work(worker)
        finally:
            # An unexpected error must leave nothing of it.
            worker, self._worker = self._worker, None
            if worker is not None:
                await worker.end()
            if left := [sent.unit for sent in self._sent.values() if sent.unit.open]:
                self._source.requeue(left)

    async def _work(self, worker: WorkerProcess | None) -> None:
        while True:
            if worker is None:
                try:
                    worker = await self._source.open_worker()
                except RewardError as error:
                    self._source.record_end(error.message, overdue=False)
                    continue
            self._worker, self._first = worker, self._tickets
            worker.on_event = self.wake
            try:
                overdue = await self._serve_worker(worker)
            except asyncio.CancelledError:
                self._worker = None
                await worker.end(at_once=bool(self._sent))
                for sent in self._sent.values():
                    sent.unit.answer(CLOSED)
                raise
            self._worker = None
            self._on_worker_ended(worker, overdue, await worker.end())
            worker = None

    async def _serve_worker(self, worker: WorkerProcess) -> list[int] | None:
        """Feeds a worker until it is overdue (returns the overdue tickets), or lost (None)."""
        asleep_until = math.inf
        while True:
            self._wake.clear()
            self._accept_answers(worker)
            if worker.lost:
                return None
            if time.monotonic() - asleep_until > _ABSENT_S:
                # This process stood still, and the worker maybe too: it gets its time again.
                self._judged_from = time.monotonic() + self._source.call_timeout_s
            if (overdue := self._overdue(worker)) is not None:
                return overdue
            self._recall(worker)
            self._feed(worker)
            patience = self._next_check_s(worker)
            asleep_until = math.inf if patience is None else time.monotonic() + patience
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._wake.wait()

    def _accept_answers(self, worker: WorkerProcess) -> None:
        now = time.monotonic()
        answered: list[_Sent] = []
        for ticket, outcomes in worker.read_answers():
            sent = self._sent.pop(ticket, None)
            if sent is None:  # it was recalled too late, and another worker has it now
                continue
            if outcomes is None:
                sent.unit.begun = False
            else:
                answered.append(sent)
                sent.unit.answer(outcomes)
        if not answered:
            return
        self._source.record_duration(answered[0].unit.function, now - answered[0].at, len(answered))
        if not self._source.concurrent:
            for sent in self._sent.values():
                sent.at = now

    def _feed(self, worker: WorkerProcess) -> None:
        while not self._sent or (self._source.concurrent and not self._holds_suspect()):
            units = self._source.next_units(len(self._sent), new=self._tickets == self._first)
            if not units:
                return
            now = time.monotonic()
            message = []
            for unit in units:
                unit.begun = True
                self._sent[self._tickets] = _Sent(unit, now)
                times = unit.call.times
                # A plain function is not interrupted but by its owner: to its worker only the beginning matters.
                until = times.deadline if self._source.concurrent else times.begin_by
                message.append((self._tickets, until, unit.items))
                self._tickets += 1
            worker.send((units[0].function, message))

    def _holds_suspect(self) -> bool:
        """True if the worker holds a suspect, which has its worker for itself."""
        return len(self._sent) == 1 and any(s.unit.trial in (Trial.ALONE, Trial.FIRST) for s in self._sent.values())

    # ------------------------------------------------------------------------------------------ judging

    def _overdue(self, worker: WorkerProcess) -> list[int] | None:
        """The overdue tickets of a worker that is to be ended now; None: it may continue."""
        due, busy = self._due(worker)
        now = time.monotonic()
        if now < max(due, self._judged_from):
            return None
        if busy is not None and (not self._source.concurrent or now - worker.page.began >= _GRACE_S):
            return [busy]
        if not self._source.concurrent:
            return []  # it has not even begun: it is stopped, not slow
        # Its event loop runs, or is blocked by something that belongs to no ticket.
        latest = now - self._source.call_timeout_s - _GRACE_S
        return [ticket for ticket, sent in self._sent.items() if sent.at <= latest] or None

    def _due(self, worker: WorkerProcess) -> tuple[float, int | None]:
        """The time at which the worker will be overdue at present, and the ticket that it is busy with."""
        limit = self._source.call_timeout_s
        silent = min((sent.at for sent in self._sent.values()), default=math.inf) + limit + _GRACE_S
        # In this order: see `SharedPage`.
        busy, began = worker.page.unit, worker.page.began
        if busy not in self._sent:
            return silent, None
        return (min(silent, began + limit) if self._source.concurrent else began + limit), busy

    def _next_check_s(self, worker: WorkerProcess) -> float | None:
        """Seconds until the next check; None: only an event can change anything."""
        due, _ = self._due(worker)
        if due == math.inf:
            return None
        left = max(0.001, max(due, self._judged_from) - time.monotonic())
        several = len(self._sent) > 1 and not self._source.concurrent
        return min(left, _STUCK_S) if several else left

    def _recall(self, worker: WorkerProcess) -> None:
        """Gives units that wait for a slow one to other workers."""
        busy = worker.page.unit
        if self._source.concurrent or len(self._sent) < 2 or busy not in self._sent:
            return
        if time.monotonic() - worker.page.began < _STUCK_S:
            return
        worker.page.recall(self._tickets - 1)
        waiting = [ticket for ticket in self._sent if ticket != busy]
        self._source.requeue([self._sent.pop(ticket).unit for ticket in waiting])

    def _on_worker_ended(self, worker: WorkerProcess, overdue: list[int] | None, ending: Ending) -> None:
        """Answers the guilty units of an ended worker, and requeues its other units."""
        self._accept_answers(worker)
        guilty = overdue or []
        verdict = Failed("timeout", f"no answer within {self._source.call_timeout_s:g} s; its worker was ended")
        if overdue is None:
            verdict = Failed("crashed", f"its worker died: {ending.description}", retryable=ending.from_outside)
            suspects = [ending.unit] if ending.unit in self._sent else list(self._sent)
            if self._tickets == self._first + 1:
                guilty = suspects
            else:
                self._mark_suspects([self._sent[ticket].unit for ticket in suspects])
        called = self._sent[overdue[0]].unit.function if overdue else None
        self._source.record_end(ending.description, overdue=overdue is not None, function=called)
        for ticket in guilty:
            unit = self._sent.pop(ticket).unit
            if unit.open:
                unit.answer(verdict)
            elif not verdict.retryable:
                self._source.store_verdict(unit, verdict)
            log.warning("reward worker %d, %s: %s", worker.pid, self._source.name(unit.function), verdict.message)
        left = [sent.unit for sent in self._sent.values() if sent.unit.open]
        self._sent.clear()
        self._source.requeue(left)

    def _mark_suspects(self, units: list[Unit]) -> None:
        """Marks units of which one may have ended their worker, to be tried with more care."""
        for unit in units:
            if len(units) == 1:
                unit.trial = Trial.FIRST
            elif self._source.concurrent and unit.trial is Trial.TOGETHER:
                unit.trial = Trial.AGAIN
            else:
                unit.trial = Trial.ALONE
