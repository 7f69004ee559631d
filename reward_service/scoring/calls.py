"""Calls of reward functions: in threads and an event loop of this process, or in worker processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.wait import Wait
from rollmesh.reward_service.cache.identity import Identity
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.function_kind import FunctionKind
from rollmesh.reward_service.functions import RewardFunction
from rollmesh.reward_service.outcomes import Failed, OnAnswer, Outcome, RewardItem, not_begun
from rollmesh.reward_service.scoring.coroutines import CoroutinePool
from rollmesh.reward_service.scoring.request import Request
from rollmesh.reward_service.scoring.threads import ThreadPool
from rollmesh.reward_service.workers.pool import PoolStats, ProcessPool

OnOutcome = Callable[[int, Outcome], None]
"""Receives an item's index in its request, and its outcome; called on the event loop."""


@dataclass(frozen=True, slots=True)
class PlacedFunction:
    """A reward function, and where its calls run.

    Attributes:
        local: the function, where this process may call it.
        worker_index: its index among the functions of the worker processes, where they may.
        is_local: True if this process calls it for items of a data_source.
        identity: with which its scores are kept; none: they are not.
    """

    name: str
    local: RewardFunction | None
    worker_index: int | None
    is_local: Callable[[str], bool]
    identity: Identity | None


class FunctionCalls:
    """The threads and processes in which functions run.

    Args:
        remote: (name in the configuration, name for errors) of functions that worker processes may call.
        threads: for functions that this process calls.
        workers: most worker processes for functions that compute.
        most: the same for functions that wait for something.
        call_timeout_s: seconds that one call of a function may take.
    """

    def __init__(
        self, remote: Sequence[tuple[str, str]], *, threads: int, workers: int, most: int, call_timeout_s: float
    ) -> None:
        self._processes = ProcessPool(remote, workers=workers, most=most, call_timeout_s=call_timeout_s)
        self._threads = ThreadPool(threads)
        self._coroutines = CoroutinePool()
        self._call_timeout_s = call_timeout_s

    @property
    def hanging_threads(self) -> int:
        """Threads given up because their call hangs."""
        return self._threads.lost

    @property
    def workers(self) -> PoolStats:
        """Statistics of the worker processes."""
        return self._processes.stats

    def present_wait(self) -> Wait:
        """The reason why items wait; empty while they are scored as they come."""
        return self._threads.present_wait() or self._processes.present_wait()

    def kind(self, function: PlacedFunction) -> FunctionKind | None:
        """A function's description; None until a worker has loaded it."""
        if function.local is not None:
            return function.local.kind
        return self._processes.kind(cast("int", function.worker_index))

    async def start(self) -> None:
        """Starts a first worker, which loads the functions.

        Raises:
            RewardError: a function cannot be loaded.
        """
        await self._processes.start()

    async def close(self) -> None:
        """Ends threads and worker processes."""
        self._threads.close()
        self._coroutines.close()
        await self._processes.close()

    async def apply(
        self,
        function: PlacedFunction,
        request: Request,
        indices: Sequence[int],
        times: CallTimes,
        on_outcome: OnOutcome,
    ) -> None:
        """Calls a function for items.

        Args:
            indices: of the items, in the request.
            on_outcome: gets each item's outcome as soon as it is there; all of them before this returns.
        """
        sources = {request.items[index].data_source for index in indices}
        local_sources = {source for source in sources if function.is_local(source)}
        if len(local_sources) == len(sources):
            await self._score_here(cast("RewardFunction", function.local), request, indices, times, on_outcome)
        elif not local_sources:
            await self._score_in_workers(function, request, indices, times, on_outcome)
        else:
            near = [index for index in indices if request.items[index].data_source in local_sources]
            far = [index for index in indices if request.items[index].data_source not in local_sources]
            await asyncio.gather(*(self.apply(function, request, part, times, on_outcome) for part in (near, far)))

    # ------------------------------------------------------------------------------------------ this process

    async def _score_here(
        self,
        function: RewardFunction,
        request: Request,
        indices: Sequence[int],
        times: CallTimes,
        on_outcome: OnOutcome,
    ) -> None:
        items: dict[int, RewardItem] = {}
        for index in indices:
            parsed = request.parsed(index)
            if isinstance(parsed, Failed):
                on_outcome(index, parsed)
            else:
                items[index] = parsed
        units = _units(request, items, whole_group=function.whole_group)
        batches = [[items[index] for index in unit] for unit in units]
        on_answer = _unit_receiver(function.name, units, on_outcome)
        if function.asynchronous:
            await self._run_coroutines(function, batches, times, on_answer)
        else:
            await self._run_threads(function, batches, times, on_answer)

    async def _run_threads(
        self,
        function: RewardFunction,
        batches: Sequence[Sequence[RewardItem]],
        times: CallTimes,
        on_answer: OnAnswer,
    ) -> None:
        works = [lambda batch=batch: function.score(batch) for batch in batches]
        share = max(1, -(-len(works) // self._threads.size))
        await asyncio.gather(
            *(
                self._threads.run(
                    works[start : start + share],
                    call_timeout_s=self._call_timeout_s,
                    times=times,
                    on_answer=lambda place, answer, start=start: on_answer(start + place, answer),  # type: ignore[misc]  # the default argument binds it
                )
                for start in range(0, len(works), share)
            )
        )

    async def _run_coroutines(
        self,
        function: RewardFunction,
        batches: Sequence[Sequence[RewardItem]],
        times: CallTimes,
        on_answer: OnAnswer,
    ) -> None:
        await self._coroutines.run(
            [lambda batch=batch: function.score_async(batch) for batch in batches],  # type: ignore[misc]  # the default argument binds it
            call_timeout_s=self._call_timeout_s,
            times=times,
            on_answer=on_answer,
        )

    # ------------------------------------------------------------------------------------------ worker processes

    async def _score_in_workers(
        self,
        function: PlacedFunction,
        request: Request,
        indices: Sequence[int],
        times: CallTimes,
        on_outcome: OnOutcome,
    ) -> None:
        worker_index = cast("int", function.worker_index)
        refused: Failed | None = None
        try:
            async with asyncio.timeout(times.deadline - time.monotonic()):
                await self._processes.start()
        except TimeoutError:
            refused = not_begun(f"{function.name}: its worker still starts")
        except RewardError as error:
            refused = Failed("no_worker", str(error), retryable=True)
        if refused is not None:
            for index in indices:
                on_outcome(index, refused)
            return
        units = _units(request, indices, whole_group=self._processes.kinds[worker_index].whole_group)
        batches = [[request.items[index].SerializeToString() for index in unit] for unit in units]
        on_answer = _unit_receiver(function.name, units, on_outcome)
        await self._processes.run(worker_index, batches, times=times, on_answer=on_answer)


def _units(request: Request, indices: Iterable[int], *, whole_group: bool) -> list[list[int]]:
    """Indices of the items that go into one call: each alone, or a group's together."""
    if not whole_group:
        return [[index] for index in indices]
    return request.groups(indices)


def _unit_receiver(function: str, units: Sequence[Sequence[int]], on_outcome: OnOutcome) -> OnAnswer:
    """Receives the answers of units, and passes the outcomes of their items on."""

    def receive(place: int, answer: list[Outcome] | Failed) -> None:
        for position, index in enumerate(units[place]):
            on_outcome(index, _with_name(answer, function) if isinstance(answer, Failed) else answer[position])

    return receive


def _with_name(failed: Failed, function: str) -> Failed:
    return replace(failed, message=f"{function}: {failed.message}")
