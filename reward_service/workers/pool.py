"""All worker processes of a service: plain functions in as many as are needed, coroutine functions in one event loop.

Invariants: every unit is answered by its call's deadline; the event loop of the caller runs no code of a function.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.mesh.wait import Wait
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.function_kind import FunctionKind
from rollmesh.reward_service.outcomes import Failed, OnAnswer
from rollmesh.reward_service.workers.calls import Call, Unit
from rollmesh.reward_service.workers.process import WorkerProcess
from rollmesh.reward_service.workers.unit_queue import UnitQueue


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Workers at present, and what has become of them since the start.

    Attributes:
        workers: at present.
        overdue: that were ended for being overdue.
        died: that ended by themselves.
        busy_s: seconds that workers of plain functions had calls, of all together.
    """

    workers: int = 0
    overdue: int = 0
    died: int = 0
    busy_s: float = 0.0


class ProcessPool:
    """Runs functions, known by their index in `functions`, in worker processes.

    Args:
        functions: (name in the configuration, name for errors).
        workers: most processes for plain functions that compute.
        most: the same for those that wait for something.
        call_timeout_s: seconds that one call of a function may take.
    """

    def __init__(self, functions: Sequence[tuple[str, str]], *, workers: int, most: int, call_timeout_s: float) -> None:
        self.kinds: list[FunctionKind] = []
        self._functions = functions
        self._plain = UnitQueue(functions, limit=workers, most=most, concurrent=False, call_timeout_s=call_timeout_s)
        self._coroutines = UnitQueue(functions, limit=1, concurrent=True, call_timeout_s=call_timeout_s)
        self._call_timeout_s = call_timeout_s
        self._starting: asyncio.Task[None] | None = None

    @property
    def stats(self) -> PoolStats:
        """See `PoolStats`."""
        queues = (self._plain, self._coroutines)
        return PoolStats(
            sum(len(queue.pids) for queue in queues),
            sum(queue.overdue for queue in queues),
            sum(queue.died for queue in queues),
            # A worker with coroutines is not busy: many of them wait at a time.
            self._plain.busy_s,
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [*self._plain.pids, *self._coroutines.pids]

    def kind(self, function: int) -> FunctionKind | None:
        """The kind of a function, by its index; None before a worker has loaded it."""
        return self.kinds[function] if self.kinds else None

    async def start(self) -> None:
        """Starts a first worker, which describes the functions, unless there has been one.

        Raises:
            RewardError: a function that cannot be loaded.
        """
        if self.kinds:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start(), name="first-reward-worker")
        # A caller may give up; the worker continues to load for the next one.
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        worker, self.kinds = await WorkerProcess.open(self._functions, self._call_timeout_s, tested=False)
        plain = any(not kind.asynchronous for kind in self.kinds)
        (self._plain if plain else self._coroutines).adopt(worker)

    async def run(
        self, function: int, units: Sequence[Sequence[bytes]], *, times: CallTimes, on_answer: OnAnswer
    ) -> None:
        """Calls a function once per unit.

        Args:
            function: its index.
            units: serialized ScoreItems per call.
            times: until when units may be begun, and by when all must be answered.
            on_answer: gets each unit's answer as soon as it is there; all of them before this returns.
        """
        queue = self._coroutines if self.kinds[function].asynchronous else self._plain
        call = Call(len(units), times, on_answer)
        mine = [Unit(call, place, function, items) for place, items in enumerate(units)]
        queue.enqueue(mine)
        late = Failed("timeout", "the call's deadline passed: a worker is still busy with it", retryable=True)
        try:
            await asyncio.wait((call.done,), timeout=max(0.0, times.begin_by - time.monotonic()))
            for unit in mine:
                if unit.open and not unit.begun:
                    unit.answer(queue.not_begun())
            await asyncio.wait((call.done,), timeout=max(0.0, times.deadline - time.monotonic()))
        finally:
            for unit in mine:
                if unit.open:
                    unit.answer(late if unit.begun else queue.not_begun())

    def present_wait(self) -> Wait:
        """The reason why items wait; empty while they are scored as they come."""
        return self._plain.present_wait() or self._coroutines.present_wait()

    async def close(self) -> None:
        """Ends all workers and all that their functions have started in their process groups."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(self._plain.close(), self._coroutines.close())
