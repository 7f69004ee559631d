"""The queue of units that several workers serve, and the number of these workers.

Invariants: a unit waits for a worker on its call's time, not on its own. Workers are started when units wait: at most
`limit` where they compute, and at most `most` where they wait for something. A unit under suspicion is tried alone or
first, as its `Trial` says. Workers that die one after another are started ever more slowly, and the reason is logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import membership_pb2
from rollmesh.reward_service.outcomes import Failed, not_begun
from rollmesh.reward_service.workers.calls import CLOSED, Trial, Unit
from rollmesh.reward_service.workers.cpu_effort import CpuEffort, processor_seconds
from rollmesh.reward_service.workers.process import WorkerProcess
from rollmesh.reward_service.workers.slot import Slot

log = logging.getLogger(__name__)

# Seconds that a unit waits before another worker is started for it.
_PATIENCE_S = 0.1
# Seconds between two checks that workers compute at all.
_LOOK_S = 0.5
# Seconds of a wait, and of a call, that are worth a message.
_SLOW_S, _WORTH_TELLING_S = 2.0, 0.01
# Seconds of work that are not worth a second worker.
_NOTHING_S = 0.005
# Seconds of work in one message to a worker, and most units and bytes of it.
_MESSAGE_S = 0.05
_MESSAGE_UNITS = 256
_MESSAGE_BYTES = 1 << 20
# Coroutines that one event loop runs together.
_TOGETHER = 256
# Weight of the last measurement in a function's seconds per unit.
_NEWS = 0.3
# Verdicts that wait for a call that asks again.
_VERDICTS = 1024
# An overdue call explains a wait for this many of its time limits after its end, and this many of them are counted.
_RECENT_LIMITS = 2
_MOST_RECENT = 4096
# Deaths in a row that are no pattern yet; then pauses between starts grow up to the longest.
_FEW_DEATHS = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class UnitQueue:
    """Workers for functions of one kind.

    Args:
        functions: (name in the configuration, name for errors) of all that a worker loads.
        limit: most workers that compute.
        most: the same for workers that wait for something: a model's judgement, a sandbox.
        concurrent: they run coroutine functions, many units at a time; else one unit after another.
        call_timeout_s: seconds that one unit may take.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, str]],
        *,
        limit: int,
        concurrent: bool,
        call_timeout_s: float,
        most: int | None = None,
    ) -> None:
        self.concurrent = concurrent
        self.call_timeout_s = call_timeout_s
        self.overdue = 0
        self.died = 0
        # Seconds of workers with calls, overdue ones included, since the start.
        self.busy_s = 0.0
        # When workers were ended for being overdue, lately.
        self._ended_overdue: deque[float] = deque(maxlen=_MOST_RECENT)
        # Name of the function of the call that was ended last.
        self._last_overdue = ""
        self._functions = functions
        self._limit = limit
        self._most = max(limit, most or 0)
        self._cpu_effort = CpuEffort()
        self._waiting: deque[Unit] = deque()
        # A worker has died for each of these, so as many new workers start as there are suspects.
        self._suspects: deque[Unit] = deque()
        self._verdicts: dict[bytes, Failed] = {}
        self._slots: dict[Slot, asyncio.Task[None]] = {}
        self._seconds: dict[int, float] = {}
        self._deaths = 0
        self._last_death = ""
        self._growth: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that have loaded their functions; any thread may ask."""
        return [slot.pid for slot in tuple(self._slots) if slot.pid is not None]

    def enqueue(self, units: Sequence[Unit]) -> None:
        """Queues units."""
        if self._closed:
            for unit in units:
                unit.answer(CLOSED)
            return
        # If no worker takes any, units without a caller are dropped here.
        while self._waiting and not self._waiting[0].open:
            self._waiting.popleft()
        self._waiting.extend(units)
        self._wake_slots()

    def present_wait(self) -> Wait:
        """The reason why units wait; empty while they are taken as they come."""
        if failing := self._failure_reason():
            return Wait(failing)
        oldest = next((unit for unit in self._waiting if unit.open), None)
        waited = time.monotonic() - oldest.queued if oldest is not None else 0.0
        if waited < _SLOW_S:
            return NO_WAIT
        calls = f"{len(self._waiting)} calls of reward functions wait, the longest for {waited:.0f} s"
        load = self._load()
        return replace(load, reason=f"{calls}: {load.reason}")

    def not_begun(self) -> Failed:
        """The outcome of a unit that has waited in vain: no failure, unless no worker can be started."""
        if failing := self._failure_reason():
            return Failed("timeout", f"the call's deadline passed: {failing}", retryable=True)
        return not_begun(self._load().reason)

    def _failure_reason(self) -> str:
        """The reason why no worker lives long enough to do anything; empty while they do."""
        if self._deaths > _FEW_DEATHS:
            return f"{self._deaths} reward workers ended one after another, at last: {self._last_death}"
        return ""

    def _load(self) -> Wait:
        """The reason why no worker is free."""
        each = max(self._seconds.values(), default=0.0)
        text = f"no free worker, {len(self._slots)} are busy or start (reward.workers)"
        text += f", {each:.2g} s a call" if each >= _WORTH_TELLING_S else ""
        within_s = _RECENT_LIMITS * self.call_timeout_s
        if not (recent := self._recently_overdue(within_s)):
            return Wait(text)
        text += f"; {self._last_overdue or 'a reward function'} did not return within {self.call_timeout_s:g} s "
        text += f"(reward.scorer_timeout_s), which ended {recent} workers in the last {within_s:g} s; "
        text += "the responses of such calls end without a reward"
        return Wait(text, membership_pb2.WAIT_CAUSE_REWARD_OVERDUE)

    def _recently_overdue(self, within_s: float) -> int:
        """Number of workers that were ended in the last seconds for being overdue."""
        after = time.monotonic() - within_s
        while self._ended_overdue and self._ended_overdue[0] <= after:
            self._ended_overdue.popleft()
        return len(self._ended_overdue)

    def adopt(self, worker: WorkerProcess | None = None) -> None:
        """Adds a slot, with a worker that has loaded its functions already, or none yet."""
        slot = Slot(self)
        task = asyncio.get_running_loop().create_task(slot.run(worker), name="reward-worker")
        self._slots[slot] = task
        task.add_done_callback(lambda done: self._on_slot_ended(slot, done))

    async def close(self) -> None:
        """Ends the workers, those without work in peace."""
        if self._growth is not None:
            self._growth.cancel()
        self._closed = True
        for task in self._slots.values():
            task.cancel()
        await asyncio.gather(*self._slots.values(), return_exceptions=True)
        self._slots.clear()
        for unit in chain(self._suspects, self._waiting):
            unit.answer(CLOSED)

    # ------------------------------------------------------------------------------------------ called by slots

    async def open_worker(self) -> WorkerProcess:
        """See `UnitSource`."""
        if (excess := self._deaths - _FEW_DEATHS) > 0:
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(excess, 10)))
        # The pool's first worker has tested the scorers.
        worker, _ = await WorkerProcess.open(self._functions, self.call_timeout_s, tested=True)
        return worker

    def name(self, function: int) -> str:
        """See `UnitSource`."""
        return self._functions[function][1]

    def next_units(self, held: int, *, new: bool) -> list[Unit]:
        """See `UnitSource`."""
        while new and self._suspects:
            if (unit := self._suspects.popleft()).open:
                return [unit]
        units: list[Unit] = []
        size = 0
        most = _TOGETHER - held if self.concurrent else 1
        while self._waiting and len(units) < most and size < _MESSAGE_BYTES:
            unit = self._waiting.popleft()
            if not unit.open or self._answer_from_verdicts(unit):
                continue
            alone = unit.trial is Trial.ALONE
            if (units and unit.function != units[0].function) or (alone and (units or held)):
                self._waiting.appendleft(unit)
                break
            # A new worker that dies with one unit leaves no doubt about which it was.
            if not units and not self.concurrent and not new:
                most = self._message_units(unit.function)
            units.append(unit)
            if alone:
                break
            size += sum(map(len, unit.items))
        return units

    def requeue(self, units: list[Unit]) -> None:
        """See `UnitSource`."""
        for unit in reversed(units):
            unit.begun = False
            (self._suspects if unit.trial is Trial.FIRST else self._waiting).appendleft(unit)
        self._wake_slots()

    def store_verdict(self, unit: Unit, verdict: Failed) -> None:
        """See `UnitSource`."""
        if len(self._verdicts) >= _VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[unit.key] = verdict

    def _answer_from_verdicts(self, unit: Unit) -> bool:
        """Answers a unit from the verdict of a former call that asked the same; False without one."""
        verdict = self._verdicts.pop(unit.key, None) if self._verdicts else None
        if verdict is not None:
            unit.answer(verdict)
        return verdict is not None

    def record_duration(self, function: int, seconds: float, units: int) -> None:
        """See `UnitSource`."""
        self._deaths = 0
        self.busy_s += seconds
        each = seconds / units
        before = self._seconds.get(function, each)
        self._seconds[function] = before + _NEWS * (each - before)

    def record_end(self, why: str, *, overdue: bool, function: int | None = None) -> None:
        """See `UnitSource`."""
        if overdue:
            self.overdue += 1
            self.busy_s += self.call_timeout_s
            self._ended_overdue.append(time.monotonic())
            self._last_overdue = self._last_overdue if function is None else self.name(function)
            return
        self.died += 1
        self._deaths += 1
        self._last_death = why
        if failing := self._failure_reason():
            log.error("%s", failing)

    # ------------------------------------------------------------------------------------------ size

    def _message_units(self, function: int) -> int:
        """Number of units for one message: as many as take a moment, at most this worker's share of the queue."""
        each = self._seconds.get(function)
        if each is None:
            return 1
        share = -(-(len(self._waiting) + 1) // max(1, len(self._slots)))
        least, most = (int(seconds / max(each, 1e-6)) for seconds in (_NOTHING_S, _MESSAGE_S))
        return max(1, min(_MESSAGE_UNITS, most, max(share, least)))

    def _wake_slots(self) -> None:
        """Wakes slots because units wait, and starts another worker if units still wait after a moment."""
        if self._closed or not (self._suspects or self._waiting):
            return
        for slot in self._slots:
            if slot.idle or self.concurrent:
                slot.wake()
        if self._growth is None and len(self._slots) < self._most:
            patience_s = _PATIENCE_S if len(self._slots) < self._limit else _LOOK_S
            self._growth = asyncio.get_running_loop().call_later(patience_s if self._slots else 0.0, self._grow)

    def _on_slot_ended(self, slot: Slot, task: asyncio.Task[None]) -> None:
        """Handles the end of a slot: with the queue, or by an unexpected error, after which others do its work."""
        if self._closed or task.cancelled():
            return
        del self._slots[slot]
        log.error("a reward worker is abandoned", exc_info=task.exception())
        self.record_end(f"{task.exception()!r}", overdue=False)
        self._wake_slots()

    def _grow(self) -> None:
        self._growth = None
        waits = next((unit for unit in chain(self._suspects, self._waiting) if unit.open), None)
        if waits is None or len(self._slots) >= self._most:
            return
        wanted = not self._slots or time.monotonic() - waits.queued >= _PATIENCE_S
        if wanted and (len(self._slots) < self._limit or self._cpu_effort.is_waiting(self._processor_times())):
            self.adopt()
        self._wake_slots()

    def _processor_times(self) -> dict[int, float]:
        """Seconds of processor time by worker; empty while one starts: it computes."""
        if any(slot.pid is None for slot in self._slots):
            return {}
        return {pid: seconds for pid in self.pids if (seconds := processor_seconds(pid)) is not None}
