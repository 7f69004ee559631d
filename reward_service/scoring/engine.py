"""Scores items with reward functions: routing by data_source, deadlines, and the places where functions run.

Invariants
  * Each item has one result, as soon as it is there, by the deadline.
  * An item that is begun gets its whole time. One that cannot be begun in time is answered as not begun; that is no
    failure.
  * One item's failure touches no other item; a group function's failure touches its group alone.

The sum of several functions: `reward_service.composition`. Scores of equal items: `reward_service.cache`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

from rollmesh.mesh.config.scorers.late import LateSection
from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.cache.cache import ScoreCache
from rollmesh.reward_service.cache.identity import Identity, identity_of, is_named
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.composition.part import Entry
from rollmesh.reward_service.composition.plan import Composition, Interval
from rollmesh.reward_service.composition.running import run_parts
from rollmesh.reward_service.function_kind import FunctionKind, Needs
from rollmesh.reward_service.function_spec import FunctionSpec, label_of
from rollmesh.reward_service.functions import RewardFunction
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.late.rewards import LateRewards
from rollmesh.reward_service.loading import is_path, load_function
from rollmesh.reward_service.outcomes import (
    Failed,
    OnAnswer,
    Outcome,
    RewardItem,
    not_begun,
    to_proto,
)
from rollmesh.reward_service.scorers import is_linear, reads_mathematics
from rollmesh.reward_service.scorers.graders import check_versions
from rollmesh.reward_service.scorers.versions import versions_of
from rollmesh.reward_service.scoring.coroutines import CoroutinePool
from rollmesh.reward_service.scoring.request import Request
from rollmesh.reward_service.scoring.threads import ThreadPool
from rollmesh.reward_service.workers.pool import PoolStats, ProcessPool

log = logging.getLogger(__name__)
OnResult = Callable[[int, reward_pb2.ScoreResult], None]
"""Receives an item's place in its call, and its result."""
_OnOutcome = Callable[[int, Outcome], None]


@dataclass(frozen=True, slots=True)
class _Function:
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


class Service(Protocol):
    """A process of a function's own, besides its calls."""

    async def start(self) -> None:
        """Begins it, ahead of the first call.

        Raises:
            RewardError: it cannot be begun.
        """
        ...

    async def close(self) -> None:
        """Ends it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The functions of a source, in the order of the composition's parts."""

    composition: Composition
    functions: tuple[_Function, ...]


class ScoringEngine:
    """Runs the reward functions of one process and its workers.

    Args:
        functions: names, functions or parts with options: together they are the reward.
        by_data_source: data_source -> functions that take precedence for it.
        normalize: data_source -> totals that become rewards of 0 and 1.
        cache: of scores, closed with the engine; none: nothing is kept.
        late: rewards that are promised, closed with the engine; none: none may be.
        attempts: tries of a part whose error does not fail the item.
        workers: most worker processes for functions that compute.
        waiting_workers: the same for functions that wait for something, and threads where functions are given as
            objects; none: `workers`.
        call_timeout_s: seconds that one call of a function may take.

    Attributes:
        scorers: versions by name of those of its functions that come with the package.
        judge: limits, budget and counts of the judge; None without one.
        cache, call_timeout_s: see above.

    Raises:
        RewardError: a scorer that does not exist, a function given as an object that has no known signature, or parts
            that do not fit together.
    """

    def __init__(
        self,
        functions: Sequence[Entry],
        by_data_source: Mapping[str, Sequence[Entry]] = MappingProxyType({}),
        *,
        normalize: Mapping[str, Interval] = MappingProxyType({}),
        cache: ScoreCache | None = None,
        late: LateRewards | None = None,
        attempts: int = 3,
        workers: int = 4,
        waiting_workers: int | None = None,
        call_timeout_s: float = 8.0,
    ) -> None:
        self.cache = cache
        self._late = late or LateRewards(LateSection())
        most = max(workers, waiting_workers or 0)
        self.call_timeout_s = call_timeout_s
        self._remote: list[tuple[str, str]] = []
        self._waits: list[Callable[[], Wait]] = []
        self._services: list[Service] = []
        self.judge: Accounts | None = None
        self.scorers: dict[str, str] = {}
        self._attempts = attempts
        self._default = self._plan(functions)
        self._by_data_source = {
            source: self._plan(own, normalize.get(source)) for source, own in by_data_source.items()
        }
        for source in normalize.keys() - by_data_source.keys():
            self._by_data_source[source] = _Plan(Composition(functions, normalize[source]), self._default.functions)
        plans = (self._default, *self._by_data_source.values())
        parts = [part for plan in plans for part in plan.composition.parts]
        self.scorers |= versions_of(part.use for part in parts if isinstance(part.use, str))
        self._processes = ProcessPool(self._remote, workers=workers, most=most, call_timeout_s=call_timeout_s)
        # One thread is all that linear scorers can use.
        objects = any(function.worker_index is None for function in self._functions())
        self._threads = ThreadPool(most if objects else 1)
        self._coroutines = CoroutinePool()

    @property
    def hanging_threads(self) -> int:
        """Threads given up because their call hangs."""
        return self._threads.lost

    @property
    def workers(self) -> PoolStats:
        """Statistics of the worker processes."""
        return self._processes.stats

    @property
    def needs(self) -> Needs:
        """The needs of all its functions; of those that only workers know, once these have loaded them."""
        return Needs.of(map(self._kind, self._functions()))

    def present_wait(self) -> Wait:
        """The reason why items wait; empty while they are scored as they come."""
        waits = (self._threads.present_wait, self._processes.present_wait, *self._waits)
        return next((wait for present_wait in waits if (wait := present_wait())), NO_WAIT)

    async def start(self) -> None:
        """Loads the functions that worker processes are to run, ahead of the first `score` that needs them.

        Raises:
            RewardError: a function that cannot be loaded, or one that would grade with packages that were not tested.
        """
        if any(reads_mathematics(spec) for spec, _ in self._remote):
            check_versions()
        await asyncio.gather(*(service.start() for service in self._services))
        # `auto` needs a worker for few sources, so it gets one when the first item of these comes.
        if any(spec != "auto" for spec, _ in self._remote):
            await self._processes.start()

    async def score(self, items: Sequence[reward_pb2.ScoreItem], timeout_s: float) -> list[reward_pb2.ScoreResult]:
        """Scores items: one result per item, in order, within `timeout_s` seconds."""
        results = [reward_pb2.ScoreResult()] * len(items)
        await self.score_each(items, timeout_s, results.__setitem__)
        return results

    async def score_each(self, items: Sequence[reward_pb2.ScoreItem], timeout_s: float, on_result: OnResult) -> None:
        """Scores items within `timeout_s` seconds; work that is not done ends where this is cancelled.

        Args:
            on_result: gets each item's result as soon as it is there; all of them before this returns.
        """
        request = Request(items)
        routed: dict[_Plan, list[int]] = {}
        for index, item in enumerate(items):
            routed.setdefault(self._by_data_source.get(item.data_source, self._default), []).append(index)
        await asyncio.gather(
            *(self._route(plan, request, indices, timeout_s, on_result) for plan, indices in routed.items())
        )

    async def close(self) -> None:
        """Ends threads and processes, and what the cache still writes."""
        self._threads.close()
        self._coroutines.close()
        await asyncio.gather(*(service.close() for service in self._services))
        await self._processes.close()
        if self.cache is not None:
            await self.cache.close()
        self._late.close()

    # ------------------------------------------------------------------------------------------ routing

    def _plan(self, entries: Sequence[Entry], normalize: Interval | None = None) -> _Plan:
        composition = Composition(entries, normalize)
        placed = zip(composition.parts, composition.names, strict=True)
        return _Plan(composition, tuple(self._placed(part.use, name) for part, name in placed))

    def _placed(self, spec: FunctionSpec, name: str) -> _Function:
        """Decides where a function runs."""
        local = None if is_path(spec) else load_function(spec, name=name)
        if not isinstance(spec, str):
            self._attach(spec, name)
            return _Function(name, local, None, lambda _source: True, self._identity(spec))
        if (spec, name) not in self._remote:
            self._remote.append((spec, name))
        place = self._remote.index((spec, name))
        return _Function(name, local, place, lambda source: is_linear(spec, source), self._identity(spec))

    def _identity(self, spec: FunctionSpec) -> Identity | None:
        if self.cache is None:
            return None
        identity = identity_of(spec)
        if isinstance(identity, Identity):
            return identity
        if is_named(spec, self.cache.functions):
            log.warning("scores of %s are not kept (reward.cache.functions): %s", label_of(spec), identity)
        return None

    def _attach(self, function: Callable[..., Any], name: str) -> None:
        """Takes over what a function says of itself: reasons to wait, version, what starts and ends, accounts."""
        if (version := getattr(function, "version", None)) is not None:
            self.scorers[name] = str(version)
        if (present_wait := getattr(function, "present_wait", None)) is not None:
            self._waits.append(present_wait)
        if (service := getattr(function, "rollmesh_service", None)) is not None and service not in self._services:
            self._services.append(service)
        if isinstance(accounts := getattr(function, "accounts", None), Accounts):
            self.judge = accounts

    def _functions(self) -> list[_Function]:
        return [function for plan in (self._default, *self._by_data_source.values()) for function in plan.functions]

    def _kind(self, function: _Function) -> FunctionKind | None:
        """A function's description; None until a worker has loaded it."""
        if function.local is not None:
            return function.local.kind
        return self._processes.kind(cast("int", function.worker_index))

    async def _route(
        self, plan: _Plan, request: Request, indices: Sequence[int], timeout_s: float, on_result: OnResult
    ) -> None:
        """Finds the rewards of the items of a plan."""
        composition = plan.composition
        await run_parts(
            composition,
            request.groups(indices),
            partial(self._call, plan, request),
            CallTimes.within(timeout_s, composition.stages * self.call_timeout_s),
            attempts=self._attempts,
            on_outcome=lambda index, outcome: on_result(index, to_proto(request.items[index].item_id, outcome)),
        )

    async def _call(
        self,
        plan: _Plan,
        request: Request,
        place: int,
        indices: Sequence[int],
        times: CallTimes,
        on_outcome: _OnOutcome,
    ) -> None:
        """Finds the outcomes of one function in the cache, or calls it."""
        function = plan.functions[place]
        indices = self._late.without_known(function.name, request.items, indices, on_outcome)
        on_outcome = self._late.receiver(function.name, request.items, on_outcome)

        async def compute(missing: Sequence[int], on_outcome: _OnOutcome) -> None:
            if missing:
                await self._apply(function, request, missing, times, on_outcome)

        keys = self._keys(function, request, indices)
        if self.cache is None or not keys:
            await compute(indices, on_outcome)
            return
        rest = [index for index in indices if index not in keys]
        await asyncio.gather(self.cache.answer(keys, compute, times, on_outcome), compute(rest, on_outcome))

    def _keys(self, function: _Function, request: Request, indices: Sequence[int]) -> dict[int, bytes]:
        """Keys of the items whose scores by a function are kept."""
        identity, kind = function.identity, self._kind(function)
        if self.cache is None or identity is None or kind is None or not identity.covers(kind, self.cache.functions):
            return {}
        # A linear scorer costs less than a look into the cache.
        everything = function.worker_index is None or is_named(identity, self.cache.functions)
        kept = [i for i in indices if everything or not function.is_local(request.items[i].data_source)]
        return {index: identity.key(request.items[index], request.content(index), kind.wants) for index in kept}

    async def _apply(
        self,
        function: _Function,
        request: Request,
        indices: Sequence[int],
        times: CallTimes,
        on_outcome: _OnOutcome,
    ) -> None:
        """Applies a function, here or in workers."""
        sources = {request.items[index].data_source for index in indices}
        local_sources = {source for source in sources if function.is_local(source)}
        if len(local_sources) == len(sources):
            await self._score_here(cast("RewardFunction", function.local), request, indices, times, on_outcome)
        elif not local_sources:
            await self._score_in_workers(function, request, indices, times, on_outcome)
        else:
            near = [index for index in indices if request.items[index].data_source in local_sources]
            far = [index for index in indices if request.items[index].data_source not in local_sources]
            await asyncio.gather(*(self._apply(function, request, part, times, on_outcome) for part in (near, far)))

    # ------------------------------------------------------------------------------------------ this process

    async def _score_here(
        self,
        function: RewardFunction,
        request: Request,
        indices: Sequence[int],
        times: CallTimes,
        on_outcome: _OnOutcome,
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
                    call_timeout_s=self.call_timeout_s,
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
            call_timeout_s=self.call_timeout_s,
            times=times,
            on_answer=on_answer,
        )

    # ------------------------------------------------------------------------------------------ worker processes

    async def _score_in_workers(
        self,
        function: _Function,
        request: Request,
        indices: Sequence[int],
        times: CallTimes,
        on_outcome: _OnOutcome,
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


def _unit_receiver(function: str, units: Sequence[Sequence[int]], on_outcome: _OnOutcome) -> OnAnswer:
    """Receives the answers of units, and passes the outcomes of their items on."""

    def receive(place: int, answer: list[Outcome] | Failed) -> None:
        for position, index in enumerate(units[place]):
            on_outcome(index, _with_name(answer, function) if isinstance(answer, Failed) else answer[position])

    return receive


def _with_name(failed: Failed, function: str) -> Failed:
    return replace(failed, message=f"{function}: {failed.message}")
