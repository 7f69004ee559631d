"""Which sequence is computed where: token-budget micro-batches, balanced over ranks.

Pure planning on lengths. Invariants: every item appears exactly once; a micro-batch holds at most `token_budget`
tokens unless it is a single item over it; neighbours of one group stay together where the budget allows, so that
their prompt is computed once; minibatches hold whole groups, in order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

MicroBatchPlan = tuple[int, ...]
"""Indices of items, groups side by side."""


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence, as the planner sees it.

    Attributes:
        group: equal for sequences that share a prompt; members of a group stand side by side.
        prompt_tokens: length of the prompt.
        response_tokens: length of the response.
    """

    group: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`minibatches[m][r]` are the micro-batches of rank r in the m-th optimizer step."""

    minibatches: tuple[tuple[tuple[MicroBatchPlan, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Members of one group that are computed together."""

    indices: tuple[int, ...]
    tokens: int


def plan_batch(items: Sequence[Item], *, token_budget: int, ranks: int = 1, minibatches: int = 1) -> BatchPlan:
    """Divides a batch into minibatches, ranks and micro-batches.

    Args:
        items: the batch.
        token_budget: tokens per micro-batch.
        ranks: data-parallel ranks.
        minibatches: optimizer steps per pass; at most one per group is made.
    """
    groups = [list(members) for _, members in itertools.groupby(range(len(items)), key=lambda i: items[i].group)]
    count = min(minibatches, max(len(groups), 1))
    steps = []
    for m in range(count):
        share = groups[m * len(groups) // count : (m + 1) * len(groups) // count]
        units = [unit for group in share for unit in _units(items, group, token_budget)]
        by_rank = partition([unit.tokens for unit in units], ranks)
        steps.append(tuple(_micro_batches([units[i] for i in chosen], token_budget) for chosen in by_rank))
    return BatchPlan(tuple(steps))


def partition(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divides items into parts of nearly equal cost: the largest differencing method.

    Karmarkar and Karp, "The differencing method of set partitioning", 1982. Parts may be empty; the indices in each
    ascend.

    Args:
        costs: cost per item.
        parts: number of parts.
    """
    if parts == 1:
        return [list(range(len(costs)))]
    # A heap entry is a partial partition: sums and members per part, the largest sum first.
    heap = [(-cost, index, [(cost, (index,)), *(((0, ()),) * (parts - 1))]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    tie = len(costs)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = sorted(
            ((a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)),
            key=lambda entry: -entry[0],
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
        tie += 1
    return [sorted(members) for _, members in heap[0][2]] if heap else [[] for _ in range(parts)]


def _units(items: Sequence[Item], group: Sequence[int], budget: int) -> list[_Unit]:
    units: list[_Unit] = []
    members: list[int] = []
    tokens = 0
    for index in group:
        item = items[index]
        if members and tokens + item.response_tokens > budget:
            units.append(_Unit(tuple(members), tokens))
            members = []
        tokens = tokens + item.response_tokens if members else item.prompt_tokens + item.response_tokens
        members.append(index)
    if members:
        units.append(_Unit(tuple(members), tokens))
    return units


def _micro_batches(units: Sequence[_Unit], budget: int) -> tuple[MicroBatchPlan, ...]:
    costs = [unit.tokens for unit in units]
    parts = max(1, -(-sum(costs) // budget))
    while True:
        division = [part for part in partition(costs, parts) if part]
        if all(len(part) == 1 or sum(costs[i] for i in part) <= budget for part in division):
            return tuple(tuple(index for i in part for index in units[i].indices) for part in division)
        parts += 1
