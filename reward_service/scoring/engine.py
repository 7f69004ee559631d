"""Scores items with reward functions: routing by data_source, deadlines, and the sum of several functions.

Invariants
  * Each item has one result, as soon as it is there, by the deadline.
  * An item that is begun gets its whole time. One that cannot be begun in time is answered as not begun; that is no
    failure.
  * One item's failure touches no other item; a group function's failure touches its group alone.
  * Several functions are summed only if no function failed. Functions without an opinion (unscorable) are left out of
    the sum, unless all are.

The place where each function runs: `reward_service.workers`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.function_kind import Needs
from rollmesh.reward_service.functions import RewardFunction
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.loading import FunctionSpec, is_path, load_function, with_names
from rollmesh.reward_service.outcomes import (
    NOT_BEGUN,
    Failed,
    OnAnswer,
    Outcome,
    RewardItem,
    Scored,
    Unscorable,
    not_begun,
    to_proto,
)
from rollmesh.reward_service.scorers import is_linear, reads_mathematics
from rollmesh.reward_service.scorers.graders import check_versions
from rollmesh.reward_service.scorers.versions import versions_of
from rollmesh.reward_service.scoring.coroutines import CoroutinePool
from rollmesh.reward_service.scoring.threads import ThreadPool
from rollmesh.reward_service.workers.pool import PoolStats, ProcessPool

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
    """

    name: str
    local: RewardFunction | None
    worker_index: int | None
    is_local: Callable[[str], bool]


class _Request:
    """The items of one `score` call; those that are needed here are decoded once.

    Attributes:
        times: when its items may be begun, and when they must be done.
    """

    def __init__(self, items: Sequence[reward_pb2.ScoreItem], times: CallTimes) -> None:
        self.items = items
        self.times = times
        self._parsed: dict[int, RewardItem | Failed] = {}

    def parsed(self, index: int) -> RewardItem | Failed:
        """An item as functions see it, or the error if it cannot be read."""
        if index not in self._parsed:
            try:
                self._parsed[index] = RewardItem.from_proto(self.items[index])
            except PayloadError as error:
                self._parsed[index] = Failed("bad_input", str(error))
        return self._parsed[index]


class ScoringEngine:
    """Runs the reward functions of one process and its workers.

    Args:
        functions: names or functions, summed.
        by_data_source: data_source -> functions that take precedence for it.
        workers: most worker processes for functions that compute.
        waiting_workers: the same for functions that wait for something, and threads where functions are given as
            objects; none: `workers`.
        call_timeout_s: seconds that one call of a function may take.

    Attributes:
        scorers: versions by name of those of its functions that come with the package.
        judge: limits, budget and counts of the judge; None without one.

    Raises:
        RewardError: a scorer that does not exist, or a function given as an object that has no known signature.
    """

    def __init__(
        self,
        functions: Sequence[FunctionSpec],
        by_data_source: Mapping[str, Sequence[FunctionSpec]] = MappingProxyType({}),
        *,
        workers: int = 4,
        waiting_workers: int | None = None,
        call_timeout_s: float = 8.0,
    ) -> None:
        specs = [*functions, *(spec for own in by_data_source.values() for spec in own)]
        self.scorers = versions_of(spec for spec in specs if isinstance(spec, str))
        most = max(workers, waiting_workers or 0)
        self._call_timeout_s = call_timeout_s
        self._remote: list[tuple[str, str]] = []
        self._waits: list[Callable[[], Wait]] = []
        self._closes: list[Callable[[], None]] = []
        self.judge: Accounts | None = None
        self._default = self._placed_functions(functions)
        self._by_data_source = {source: self._placed_functions(specs) for source, specs in by_data_source.items()}
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
        return Needs.of(
            self._processes.kind(cast("int", function.worker_index)) if function.local is None else function.local.kind
            for function in self._functions()
        )

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
        request = _Request(items, CallTimes.within(timeout_s, self._call_timeout_s))
        routed: dict[tuple[_Function, ...], list[int]] = {}
        for index, item in enumerate(items):
            routed.setdefault(self._by_data_source.get(item.data_source, self._default), []).append(index)
        await asyncio.gather(
            *(self._route(functions, request, indices, on_result) for functions, indices in routed.items())
        )

    async def close(self) -> None:
        """Ends threads and worker processes."""
        self._threads.close()
        self._coroutines.close()
        for close in self._closes:
            await asyncio.to_thread(close)
        await self._processes.close()

    # ------------------------------------------------------------------------------------------ routing

    def _placed_functions(self, specs: Sequence[FunctionSpec]) -> tuple[_Function, ...]:
        return tuple(self._placed(spec, name) for spec, name in with_names(specs))

    def _placed(self, spec: FunctionSpec, name: str) -> _Function:
        """Decides where a function runs."""
        local = None if is_path(spec) else load_function(spec, name=name)
        if not isinstance(spec, str):
            self._attach(spec, name)
            return _Function(name, local, None, lambda _source: True)
        if (spec, name) not in self._remote:
            self._remote.append((spec, name))
        return _Function(name, local, self._remote.index((spec, name)), lambda source: is_linear(spec, source))

    def _attach(self, function: Callable[..., Any], name: str) -> None:
        """Takes over what a function says of itself: its reasons to wait, its version, its end, its accounts."""
        if (version := getattr(function, "version", None)) is not None:
            self.scorers[name] = str(version)
        if (present_wait := getattr(function, "present_wait", None)) is not None:
            self._waits.append(present_wait)
        if (close := getattr(function, "close", None)) is not None:
            self._closes.append(close)
        if isinstance(accounts := getattr(function, "accounts", None), Accounts):
            self.judge = accounts

    def _functions(self) -> list[_Function]:
        return [function for functions in (self._default, *self._by_data_source.values()) for function in functions]

    async def _route(
        self, functions: tuple[_Function, ...], request: _Request, indices: Sequence[int], on_result: OnResult
    ) -> None:
        """Applies functions; an item has its result once each function has its outcome."""
        names = [function.name for function in functions]
        found: dict[int, dict[int, Outcome]] = {index: {} for index in indices}

        def finish(index: int) -> None:
            outcomes = found.pop(index)
            combined = combine(names, [outcomes[column] for column in range(len(functions))])
            on_result(index, to_proto(request.items[index].item_id, combined))

        def accept(column: int, index: int, outcome: Outcome) -> None:
            found[index][column] = outcome
            if len(found[index]) == len(functions):
                finish(index)

        if not functions:
            for index in indices:
                finish(index)
        await asyncio.gather(
            *(
                self._apply(function, request, indices, partial(accept, column))
                for column, function in enumerate(functions)
            )
        )

    async def _apply(
        self, function: _Function, request: _Request, indices: Sequence[int], on_outcome: _OnOutcome
    ) -> None:
        """Applies a function, here or in workers."""
        sources = {request.items[index].data_source for index in indices}
        local_sources = {source for source in sources if function.is_local(source)}
        if len(local_sources) == len(sources):
            await self._score_here(cast("RewardFunction", function.local), request, indices, on_outcome)
        elif not local_sources:
            await self._score_in_workers(function, request, indices, on_outcome)
        else:
            near = [index for index in indices if request.items[index].data_source in local_sources]
            far = [index for index in indices if request.items[index].data_source not in local_sources]
            await asyncio.gather(*(self._apply(function, request, part, on_outcome) for part in (near, far)))

    # ------------------------------------------------------------------------------------------ this process

    async def _score_here(
        self, function: RewardFunction, request: _Request, indices: Sequence[int], on_outcome: _OnOutcome
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
            await self._run_coroutines(function, batches, request.times, on_answer)
        else:
            await self._run_threads(function, batches, request.times, on_answer)

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
        self, function: _Function, request: _Request, indices: Sequence[int], on_outcome: _OnOutcome
    ) -> None:
        worker_index = cast("int", function.worker_index)
        refused: Failed | None = None
        try:
            async with asyncio.timeout(request.times.deadline - time.monotonic()):
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
        await self._processes.run(worker_index, batches, times=request.times, on_answer=on_answer)


def _units(request: _Request, indices: Iterable[int], *, whole_group: bool) -> list[list[int]]:
    """Indices of the items that go into one call: each alone, or a group's together."""
    if not whole_group:
        return [[index] for index in indices]
    units: dict[str, list[int]] = {}
    for index in indices:
        units.setdefault(request.items[index].group_id, []).append(index)
    return list(units.values())


def _unit_receiver(function: str, units: Sequence[Sequence[int]], on_outcome: _OnOutcome) -> OnAnswer:
    """Receives the answers of units, and passes the outcomes of their items on."""

    def receive(place: int, answer: list[Outcome] | Failed) -> None:
        for position, index in enumerate(units[place]):
            on_outcome(index, _with_name(answer, function) if isinstance(answer, Failed) else answer[position])

    return receive


def _with_name(failed: Failed, function: str) -> Failed:
    return replace(failed, message=f"{function}: {failed.message}")


def combine(names: Sequence[str], outcomes: Sequence[Outcome]) -> Outcome:
    """Sums several functions' outcomes for one item.

    Components: each function's total under its name; its own parts under their names where it is the only
    function, else under `function/part`. Per-token values are summed too.
    """
    if len(outcomes) == 1 and isinstance(only := outcomes[0], Scored):  # the common case, and on the hot path
        return replace(only, components={names[0]: only.total, **only.components})
    # Where one has failed for good, it does not matter that another was not begun.
    failures = sorted((o for o in outcomes if isinstance(o, Failed)), key=lambda failed: failed.code == NOT_BEGUN)
    if failures:
        return failures[0]
    scored = [(name, outcome) for name, outcome in zip(names, outcomes, strict=True) if isinstance(outcome, Scored)]
    if not scored:
        reasons = [f"{name}: {o.reason}" for name, o in zip(names, outcomes, strict=True) if isinstance(o, Unscorable)]
        return Unscorable("; ".join(reasons)) if reasons else Failed("no_scorer", "no reward function is configured")
    components: dict[str, float] = {}
    for name, outcome in scored:
        prefix = f"{name}/" if len(names) > 1 else ""
        components[name] = outcome.total
        components.update({f"{prefix}{part}": value for part, value in outcome.components.items()})
    per_token = [outcome.per_token for _, outcome in scored if outcome.per_token]
    total = sum(outcome.total for _, outcome in scored)
    if not math.isfinite(total):
        return Failed("nan", f"the sum of {', '.join(name for name, _ in scored)} is {total}")
    return Scored(
        total=total,
        components=components,
        per_token=[sum(values) for values in zip(*per_token, strict=True)],
    )
