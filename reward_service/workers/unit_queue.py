"""The queue of units before several workers, and how many workers there are.

Invariants: a unit waits for a worker on its call's time, not on its own; workers are started when units wait, never
more than `limit` where they compute, nor than `most` where they wait for something; a unit under suspicion is tried
alone or first, as its `Trial` says; workers that die one after another are started ever more slowly, and the reason is
told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain

from rollmesh.reward_service.outcomes import Failed, not_begun
from rollmesh.reward_service.workers.calls import CLOSED, Trial, Unit
from rollmesh.reward_service.workers.cpu_effort import Effort, processor_seconds
from rollmesh.reward_service.workers.process import WorkerProcess
from rollmesh.reward_service.workers.slot import Slot

log = logging.getLogger(__name__)

# Seconds that a unit waits before another worker is started for it.
_PATIENCE_S = 0.1
# Seconds after which it is seen whether workers compute at all.
_LOOK_S = 0.5
# Seconds of a wait, and of a call, that are worth telling.
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
# Deaths in a row that are no pattern yet; then pauses between starts grow up to the longest.
_FEW_DEATHS = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class Lane:
    """Workers for functions of one kind.

    Args:
        functions: (name in the configuration, name for errors) of all that a worker loads.
        limit: most workers that compute.
        most: most workers that wait for something: a model's judgement, a sandbox.
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
        self._functions = functions
        self._limit = limit
        self._most = max(limit, most or 0)
        self._effort = Effort()
        self._queue: deque[Unit] = deque()
        # Each is here because a worker has died, so as many new workers come as there are of these.
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

    def put(self, units: Sequence[Unit]) -> None:
        """Queues units."""
        if self._closed:
            for unit in units:
                unit.answer(CLOSED)
            return
        # Where no worker takes any, those whose callers have gone leave here.
        while self._queue and not self._queue[0].open:
            self._queue.popleft()
        self._queue.extend(units)
        self._rouse()

    def waiting_reason(self) -> str:
        """Why units wait; empty while they are taken as they come."""
        if broken := self._broken():
            return broken
        oldest = next((unit for unit in self._queue if unit.open), None)
        waited = time.monotonic() - oldest.queued if oldest is not None else 0.0
        if waited < _SLOW_S:
            return ""
        return f"{len(self._queue)} calls of reward functions wait, the longest for {waited:.0f} s: {self._busy()}"

    def not_begun(self) -> Failed:
        """The outcome of a unit that has waited in vain: no failure, unless no worker can be had."""
        if broken := self._broken():
            return Failed("timeout", f"the call's deadline passed: {broken}", retryable=True)
        return not_begun(self._busy())

    def _broken(self) -> str:
        """Why no worker lives long enough to do anything; empty while they do."""
        if self._deaths > _FEW_DEATHS:
            return f"{self._deaths} reward workers ended one after another, at last: {self._last_death}"
        return ""

    def _busy(self) -> str:
        each = max(self._seconds.values(), default=0.0)
        text = f"no free worker, {len(self._slots)} are busy or start (reward.workers)"
        text += f", {each:.2g} s a call" if each >= _WORTH_TELLING_S else ""
        if self.overdue:
            text += f"; calls that were ended after {self.call_timeout_s:g} s each, so far: {self.overdue}"
        return text

    def adopt(self, worker: WorkerProcess | None = None) -> None:
        """Adds a slot, with a worker that has loaded its functions already, or none yet."""
        slot = Slot(self)
        task = asyncio.get_running_loop().create_task(slot.run(worker), name="reward-worker")
        self._slots[slot] = task
        task.add_done_callback(lambda done: self._leave(slot, done))

    async def close(self) -> None:
        """Ends the workers, those without work in peace."""
        if self._growth is not None:
            self._growth.cancel()
        self._closed = True
        for task in self._slots.values():
            task.cancel()
        await asyncio.gather(*self._slots.values(), return_exceptions=True)
        self._slots.clear()
        for unit in chain(self._suspects, self._queue):
            unit.answer(CLOSED)

    # ------------------------------------------------------------------------------------------ for the slots

    async def open_worker(self) -> WorkerProcess:
        """See `Source`."""
        if (excess := self._deaths - _FEW_DEATHS) > 0:
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(excess, 10)))
        worker, _ = await WorkerProcess.open(self._functions, self.call_timeout_s)
        return worker

    def name(self, function: int) -> str:
        """See `Source`."""
        return self._functions[function][1]

    def next_units(self, held: int, *, new: bool) -> list[Unit]:
        """See `Source`."""
        while new and self._suspects:
            if (unit := self._suspects.popleft()).open:
                return [unit]
        units: list[Unit] = []
        size = 0
        room = _TOGETHER - held if self.concurrent else 1
        while self._queue and len(units) < room and size < _MESSAGE_BYTES:
            unit = self._queue.popleft()
            if not unit.open or self._answered(unit):
                continue
            alone = unit.trial is Trial.ALONE
            if (units and unit.function != units[0].function) or (alone and (units or held)):
                self._queue.appendleft(unit)
                break
            # A new worker that dies with one unit leaves no doubt about which it was.
            if not units and not self.concurrent and not new:
                room = self._room(unit.function)
            units.append(unit)
            if alone:
                break
            size += sum(map(len, unit.items))
        return units

    def put_back(self, units: list[Unit]) -> None:
        """See `Source`."""
        for unit in reversed(units):
            unit.begun = False
            (self._suspects if unit.trial is Trial.FIRST else self._queue).appendleft(unit)
        self._rouse()

    def keep(self, unit: Unit, verdict: Failed) -> None:
        """See `Source`."""
        if len(self._verdicts) >= _VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[unit.key] = verdict

    def _answered(self, unit: Unit) -> bool:
        """A former call asked the same, and its answer came too late for that one."""
        verdict = self._verdicts.pop(unit.key, None) if self._verdicts else None
        if verdict is not None:
            unit.answer(verdict)
        return verdict is not None

    def learned(self, function: int, seconds: float, units: int) -> None:
        """See `Source`."""
        self._deaths = 0
        each = seconds / units
        before = self._seconds.get(function, each)
        self._seconds[function] = before + _NEWS * (each - before)

    def ended(self, why: str, *, overdue: bool) -> None:
        """See `Source`."""
        if overdue:
            self.overdue += 1
            return
        self.died += 1
        self._deaths += 1
        self._last_death = why
        if broken := self._broken():
            log.error("%s", broken)

    # ------------------------------------------------------------------------------------------ size

    def _room(self, function: int) -> int:
        """Units for one message: so many as take a moment, and no more than this worker's share of what waits."""
        each = self._seconds.get(function)
        if each is None:
            return 1
        share = -(-(len(self._queue) + 1) // max(1, len(self._slots)))
        least, most = (int(seconds / max(each, 1e-6)) for seconds in (_NOTHING_S, _MESSAGE_S))
        return max(1, min(_MESSAGE_UNITS, most, max(share, least)))

    def _rouse(self) -> None:
        """Tells slots that units wait, and starts another worker if they still do in a moment."""
        if self._closed or not (self._suspects or self._queue):
            return
        for slot in self._slots:
            if slot.idle or self.concurrent:
                slot.wake()
        if self._growth is None and len(self._slots) < self._most:
            patience_s = _PATIENCE_S if len(self._slots) < self._limit else _LOOK_S
            self._growth = asyncio.get_running_loop().call_later(patience_s if self._slots else 0.0, self._grow)

    def _leave(self, slot: Slot, task: asyncio.Task[None]) -> None:
        """A slot has ended: with the lane, or by an unexpected error: others do its work then."""
        if self._closed or task.cancelled():
            return
        del self._slots[slot]
        log.error("a reward worker is given up", exc_info=task.exception())
        self.ended(f"{task.exception()!r}", overdue=False)
        self._rouse()

    def _grow(self) -> None:
        self._growth = None
        waits = next((unit for unit in chain(self._suspects, self._queue) if unit.open), None)
        if waits is None or len(self._slots) >= self._most:
            return
        wanted = not self._slots or time.monotonic() - waits.queued >= _PATIENCE_S
        if wanted and (len(self._slots) < self._limit or self._effort.idle(self._processor_times())):
            self.adopt()
        self._rouse()

    def _processor_times(self) -> dict[int, float]:
        """Seconds of processor time by worker; empty while one starts: it computes."""
        if any(slot.pid is None for slot in self._slots):
            return {}
        return {pid: seconds for pid in self.pids if (seconds := processor_seconds(pid)) is not None}
