"""Scores items with reward functions: routing by data_source, deadlines, and the sum of several functions.

Invariants
  * The answer has one result per item, in order, by the deadline.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.functions import RewardFunction
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.loading import FunctionSpec, is_path, load_function, with_names
from rollmesh.reward_service.outcomes import (
    NOT_BEGUN,
    Failed,
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

Answers = list[list[Outcome] | Failed]


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
        request = _Request(items, CallTimes.within(timeout_s, self._call_timeout_s))
        outcomes: list[Outcome | None] = [None] * len(items)
        routed: dict[tuple[_Function, ...], list[int]] = {}
        for index, item in enumerate(items):
            routed.setdefault(self._by_data_source.get(item.data_source, self._default), []).append(index)

        async def route(functions: tuple[_Function, ...], indices: list[int]) -> None:
            columns = await asyncio.gather(*(self._apply(function, request, indices) for function in functions))
            names = [function.name for function in functions]
            for row, index in enumerate(indices):
                outcomes[index] = combine(names, [column[row] for column in columns])

        await asyncio.gather(*(route(functions, indices) for functions, indices in routed.items()))
        unanswered = Failed("no_scorer", "no reward function is configured")
        return [to_proto(item.item_id, outcome or unanswered) for item, outcome in zip(items, outcomes, strict=True)]

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

    async def _apply(self, function: _Function, request: _Request, indices: Sequence[int]) -> list[Outcome]:
        """Applies a function: one outcome per index."""
        sources = {request.items[index].data_source for index in indices}
        local_sources = {source for source in sources if function.is_local(source)}
        if len(local_sources) == len(sources):
            return await self._score_here(cast("RewardFunction", function.local), request, indices)
        if not local_sources:
            return await self._score_in_workers(function, request, indices)
        near = [index for index in indices if request.items[index].data_source in local_sources]
        far = [index for index in indices if request.items[index].data_source not in local_sources]
        parts = await asyncio.gather(self._apply(function, request, near), self._apply(function, request, far))
        found = dict(zip([*near, *far], [outcome for part in parts for outcome in part], strict=True))
        return [found[index] for index in indices]

    # ------------------------------------------------------------------------------------------ this process

    async def _score_here(self, function: RewardFunction, request: _Request, indices: Sequence[int]) -> list[Outcome]:
        parsed = [request.parsed(index) for index in indices]
        items = [item for item in parsed if isinstance(item, RewardItem)]
        units = _units([item.group_id for item in items], whole_group=function.whole_group)
        batches = [[items[place] for place in unit] for unit in units]
        if function.asynchronous:
            answers = await self._run_coroutines(function, batches, request.times)
        else:
            answers = await self._run_threads(function, batches, request.times)
        scored = iter(_by_place(function.name, units, answers))
        return [item if isinstance(item, Failed) else next(scored) for item in parsed]

    async def _run_threads(
        self, function: RewardFunction, batches: Sequence[Sequence[RewardItem]], times: CallTimes
    ) -> Answers:
        works = [lambda batch=batch: function.score(batch) for batch in batches]
        share = max(1, -(-len(works) // self._threads.size))
        parts = [works[start : start + share] for start in range(0, len(works), share)]
        answers = await asyncio.gather(
            *(self._threads.run(part, call_timeout_s=self._call_timeout_s, times=times) for part in parts)
        )
        return [answer for part in answers for answer in part]

    async def _run_coroutines(
        self, function: RewardFunction, batches: Sequence[Sequence[RewardItem]], times: CallTimes
    ) -> Answers:
        return await self._coroutines.run(
            [lambda batch=batch: function.score_async(batch) for batch in batches],  # type: ignore[misc]  # the default argument binds it
            call_timeout_s=self._call_timeout_s,
            times=times,
        )

    # ------------------------------------------------------------------------------------------ worker processes

    async def _score_in_workers(self, function: _Function, request: _Request, indices: Sequence[int]) -> list[Outcome]:
        worker_index = cast("int", function.worker_index)
        try:
            async with asyncio.timeout(request.times.deadline - time.monotonic()):
                await self._processes.start()
        except TimeoutError:
            return [not_begun(f"{function.name}: its worker still starts")] * len(indices)
        except RewardError as error:
            return [Failed("no_worker", str(error), retryable=True)] * len(indices)
        items = [request.items[index] for index in indices]
        units = _units([item.group_id for item in items], whole_group=self._processes.kinds[worker_index].whole_group)
        batches = [[items[place].SerializeToString() for place in unit] for unit in units]
        return _by_place(function.name, units, await self._processes.run(worker_index, batches, times=request.times))


def _units(groups: Sequence[str], *, whole_group: bool) -> list[list[int]]:
    """Places of the items that go into one call: each alone, or a group's together; `groups` holds each item's."""
    if not whole_group:
        return [[place] for place in range(len(groups))]
    units: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        units.setdefault(group, []).append(place)
    return list(units.values())


def _by_place(function: str, units: Sequence[Sequence[int]], answers: Answers) -> list[Outcome]:
    """The outcomes of the units, by the items' places."""
    outcomes: dict[int, Outcome] = {}
    for unit, answer in zip(units, answers, strict=True):
        for position, place in enumerate(unit):
            outcomes[place] = _with_name(answer, function) if isinstance(answer, Failed) else answer[position]
    return [outcomes[place] for place in range(len(outcomes))]


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
