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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from rollmesh.mesh.config.scorers.late import LateSection
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.cache.cache import ScoreCache
from rollmesh.reward_service.cache.identity import Identity, identity_of, is_named
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.composition.part import Entry
from rollmesh.reward_service.composition.plan import Composition, Interval
from rollmesh.reward_service.composition.running import run_parts
from rollmesh.reward_service.function_kind import Needs
from rollmesh.reward_service.function_spec import FunctionSpec, label_of
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.late.rewards import LateRewards
from rollmesh.reward_service.loading import is_path, load_function
from rollmesh.reward_service.outcomes import (
    to_proto,
)
from rollmesh.reward_service.scorers import is_linear, reads_mathematics
from rollmesh.reward_service.scorers.mathematics.self_test import check_versions
from rollmesh.reward_service.scorers.versions import versions_of
from rollmesh.reward_service.scoring.calls import FunctionCalls, OnOutcome, PlacedFunction
from rollmesh.reward_service.scoring.request import Request
from rollmesh.reward_service.workers.pool import PoolStats

log = logging.getLogger(__name__)
OnResult = Callable[[int, reward_pb2.ScoreResult], None]
"""Receives an item's place in its call, and its result."""


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
    functions: tuple[PlacedFunction, ...]


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
        # One thread is all that linear scorers can use.
        objects = any(function.worker_index is None for function in self._functions())
        self._calls = FunctionCalls(
            self._remote,
            threads=most if objects else 1,
            workers=workers,
            most=most,
            call_timeout_s=call_timeout_s,
        )

    @property
    def hanging_threads(self) -> int:
        """Threads given up because their call hangs."""
        return self._calls.hanging_threads

    @property
    def workers(self) -> PoolStats:
        """Statistics of the worker processes."""
        return self._calls.workers

    @property
    def needs(self) -> Needs:
        """The needs of all its functions; of those that only workers know, once these have loaded them."""
        return Needs.of(map(self._calls.kind, self._functions()))

    def present_wait(self) -> Wait:
        """The reason why items wait; empty while they are scored as they come."""
        waits = (self._calls.present_wait, *self._waits)
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
            await self._calls.start()

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
        await asyncio.gather(self._calls.close(), *(service.close() for service in self._services))
        if self.cache is not None:
            await self.cache.close()
        self._late.close()

    # ------------------------------------------------------------------------------------------ routing

    def _plan(self, entries: Sequence[Entry], normalize: Interval | None = None) -> _Plan:
        composition = Composition(entries, normalize)
        placed = zip(composition.parts, composition.names, strict=True)
        return _Plan(composition, tuple(self._placed(part.use, name) for part, name in placed))

    def _placed(self, spec: FunctionSpec, name: str) -> PlacedFunction:
        """Decides where a function runs."""
        local = None if is_path(spec) else load_function(spec, name=name)
        if not isinstance(spec, str):
            self._attach(spec, name)
            return PlacedFunction(name, local, None, lambda _source: True, self._identity(spec))
        if (spec, name) not in self._remote:
            self._remote.append((spec, name))
        place = self._remote.index((spec, name))
        return PlacedFunction(name, local, place, lambda source: is_linear(spec, source), self._identity(spec))

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

    def _functions(self) -> list[PlacedFunction]:
        return [function for plan in (self._default, *self._by_data_source.values()) for function in plan.functions]

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
        on_outcome: OnOutcome,
    ) -> None:
        """Finds the outcomes of one function in the cache, or calls it."""
        function = plan.functions[place]
        indices = self._late.without_known(function.name, request.items, indices, on_outcome)
        on_outcome = self._late.receiver(function.name, request.items, on_outcome)

        async def compute(missing: Sequence[int], on_outcome: OnOutcome) -> None:
            if missing:
                await self._calls.apply(function, request, missing, times, on_outcome)

        keys = self._keys(function, request, indices)
        if self.cache is None or not keys:
            await compute(indices, on_outcome)
            return
        rest = [index for index in indices if index not in keys]
        await asyncio.gather(self.cache.answer(keys, compute, times, on_outcome), compute(rest, on_outcome))

    def _keys(self, function: PlacedFunction, request: Request, indices: Sequence[int]) -> dict[int, bytes]:
        """Keys of the items whose scores by a function are kept."""
        identity, kind = function.identity, self._calls.kind(function)
        if self.cache is None or identity is None or kind is None or not identity.covers(kind, self.cache.functions):
            return {}
        # A linear scorer costs less than a look into the cache.
        everything = function.worker_index is None or is_named(identity, self.cache.functions)
        kept = [i for i in indices if everything or not function.is_local(request.items[i].data_source)]
        return {index: identity.key(request.items[index], request.content(index), kind.wants) for index in kept}
