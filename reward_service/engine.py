"""Scores items with reward functions: routing by data_source, deadlines, and the sum of several functions.

Invariants: the answer has one result per item, in order, by the deadline; one item's failure touches no other item
(a group function's failure: its group alone); several functions are summed only where none of them failed, and a
function without an opinion (unscorable) is left out of the sum unless all are.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mesh.errors import PayloadError
from protos import reward_pb2
from reward_service.coroutines import CoroutinePool
from reward_service.functions import RewardFunction
from reward_service.loading import FunctionSpec, load_functions
from reward_service.outcomes import Failed, Outcome, RewardItem, Scored, Unscorable, to_proto
from reward_service.pool import WorkerPool


class ScoringEngine:
    """Runs the reward functions of one process.

    Args:
        functions: names or functions, summed.
        by_data_source: data_source -> functions that take precedence for it.
        workers: threads for synchronous functions; coroutine functions share one event loop of their own.
        call_timeout_s: seconds that one call of a function may take.

    Raises:
        RewardError: a function that cannot be loaded.
    """

    def __init__(
        self,
        functions: Sequence[FunctionSpec],
        by_data_source: Mapping[str, Sequence[FunctionSpec]] = MappingProxyType({}),
        *,
        workers: int = 1,
        call_timeout_s: float = 8.0,
    ) -> None:
        self._default = load_functions(functions)
        self._by_data_source = {source: load_functions(specs) for source, specs in by_data_source.items()}
        self._call_timeout_s = call_timeout_s
        self._pool = WorkerPool(workers)
        self._coroutines = CoroutinePool()

    @property
    def lost_workers(self) -> int:
        """Threads given up because their call hangs."""
        return self._pool.lost

    async def score(self, items: Sequence[reward_pb2.ScoreItem], timeout_s: float) -> list[reward_pb2.ScoreResult]:
        """One result per item, in order, within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        outcomes: list[Outcome | None] = [None] * len(items)
        routed: dict[tuple[RewardFunction, ...], list[int]] = {}
        parsed: list[RewardItem | None] = []
        for index, message in enumerate(items):
            try:
                item = RewardItem.from_proto(message)
            except PayloadError as error:
                outcomes[index] = Failed("bad_input", str(error))
                parsed.append(None)
                continue
            parsed.append(item)
            functions = self._by_data_source.get(item.data_source, self._default)
            routed.setdefault(functions, []).append(index)

        async def route(functions: tuple[RewardFunction, ...], indices: list[int]) -> None:
            chosen = [item for index in indices if (item := parsed[index]) is not None]
            columns = await asyncio.gather(*(self._apply(function, chosen, deadline) for function in functions))
            names = [function.name for function in functions]
            for row, index in enumerate(indices):
                outcomes[index] = combine(names, [column[row] for column in columns])

        await asyncio.gather(*(route(functions, indices) for functions, indices in routed.items()))
        unanswered = Failed("no_scorer", "no reward function is configured")
        return [
            to_proto(message.item_id, outcome or unanswered) for message, outcome in zip(items, outcomes, strict=True)
        ]

    def close(self) -> None:
        """Ends the worker threads."""
        self._pool.close()
        self._coroutines.close()

    async def _apply(self, function: RewardFunction, items: Sequence[RewardItem], deadline: float) -> list[Outcome]:
        units = _units(function, items)
        if function.asynchronous:
            answers = await self._run_coroutines(function, [[items[i] for i in unit] for unit in units], deadline)
        else:
            answers = await self._run_threads(function, [[items[i] for i in unit] for unit in units], deadline)
        outcomes: list[Outcome] = [Failed("internal", "not scored")] * len(items)
        for unit, answer in zip(units, answers, strict=True):
            for position, index in enumerate(unit):
                outcomes[index] = _named(answer, function.name) if isinstance(answer, Failed) else answer[position]
        return outcomes

    async def _run_threads(
        self, function: RewardFunction, batches: Sequence[Sequence[RewardItem]], deadline: float
    ) -> list[list[Outcome] | Failed]:
        works = [lambda batch=batch: function.score(batch) for batch in batches]
        share = -(-len(works) // self._pool.workers)
        parts = [works[start : start + share] for start in range(0, len(works), share)]
        answers = await asyncio.gather(
            *(self._pool.run(part, call_timeout_s=self._call_timeout_s, deadline=deadline) for part in parts)
        )
        return [answer for part in answers for answer in part]

    async def _run_coroutines(
        self, function: RewardFunction, batches: Sequence[Sequence[RewardItem]], deadline: float
    ) -> list[list[Outcome] | Failed]:
        return await self._coroutines.run(
            [lambda batch=batch: function.score_async(batch) for batch in batches],  # type: ignore[misc]  # the default argument binds it
            call_timeout_s=self._call_timeout_s,
            deadline=deadline,
        )


def _units(function: RewardFunction, items: Sequence[RewardItem]) -> list[list[int]]:
    """Indices of the items that go into one call: each alone, or a group's together."""
    if not function.whole_group:
        return [[index] for index in range(len(items))]
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.group_id, []).append(index)
    return list(groups.values())


def _named(failed: Failed, function: str) -> Failed:
    return Failed(failed.code, f"{function}: {failed.message}", failed.retryable)


def combine(names: Sequence[str], outcomes: Sequence[Outcome]) -> Outcome:
    """Sums several functions' outcomes for one item.

    Components: each function's total under its name; its own parts under their names where it is the only
    function, else under `function/part`. Per-token values are summed too.
    """
    if len(outcomes) == 1 and isinstance(only := outcomes[0], Scored):  # the common case, and on the hot path
        return Scored(only.total, {names[0]: only.total, **only.components}, only.per_token)
    failed = next((outcome for outcome in outcomes if isinstance(outcome, Failed)), None)
    if failed is not None:
        return failed
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
