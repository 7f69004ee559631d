"""The division of sequences: token-budget micro-batches, balanced over ranks.

Pure planning on lengths. Invariants: every item appears exactly once. A micro-batch holds at most `token_budget`
tokens, padding and repeated prompts included, unless it is a single item over it. Minibatches hold whole groups, in
order. Groups that are computed as a whole, such as pairs, are each in one micro-batch, over the budget if need be.
Where prompts are shared, neighbours of one group stay together where budget and balance allow, so that their prompt is
computed once. In rows, sequences of similar length stand together, so that little is padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.partition import partition, sequence_cost
from rollmesh.learner.batching.types import Packing

SequenceCost = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], NDArray[Any]]
"""Cost of tokens after a context that is computed elsewhere, and of others that only layers with a state compute.
From int64 [S] each to [S] in any unit."""

MicroBatchPlan = tuple[int, ...]
"""Indices of items, with those of a group next to one another."""

# A group is divided over ranks where one rank would otherwise have this much more than the mean.
_UNEVEN = 1.1
# Tokens that are not trained are still fetched and held: ranks have equal parts of them too.
_SMALLEST_SHARE = 1 / 64


@dataclass(frozen=True, slots=True)
class PlanItem:
    """A sequence, as the planner sees it.

    Attributes:
        group: equal for sequences that share a prompt; members of a group stand side by side.
        prompt_tokens: length of the prompt.
        response_tokens: length of the response.
        share: of its cost that is expected to be computed; ranks are balanced by it.
    """

    group: int
    prompt_tokens: int
    response_tokens: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`minibatches[m][r]` are the micro-batches of rank r in the m-th optimizer step."""

    minibatches: tuple[tuple[tuple[MicroBatchPlan, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Members of one group that are computed together: their tokens, those of the longest with its prompt, the cost."""

    indices: tuple[int, ...]
    tokens: int
    longest: int
    cost: int


@dataclass(frozen=True, slots=True)
class _UnitBuilder:
    """Makes units of a batch's members.

    Attributes:
        items: the batch.
        budget: tokens of a unit, unless it is a single item over it.
        repeated: a prompt is computed again for every response.
        whole: a group is one unit, whatever its tokens.
        costs: of every item's prompt, of its response after that, and of the prompt where it is computed again.
    """

    items: Sequence[PlanItem]
    budget: int
    repeated: bool
    whole: bool
    costs: Sequence[tuple[float, float, float]]

    def of_group(self, group: Sequence[int]) -> list[_Unit]:
        """Neighbours of one group together, as far as the budget allows."""
        if self.whole:
            return [self.unit(group)]
        units: list[_Unit] = []
        members: list[int] = []
        tokens = 0
        for index in group:
            item = self.items[index]
            again = item.prompt_tokens if self.repeated else 0
            if members and tokens + again + item.response_tokens > self.budget:
                units.append(self.unit(members))
                members = []
            tokens = tokens + again if members else item.prompt_tokens
            tokens += item.response_tokens
            members.append(index)
        if members:
            units.append(self.unit(members))
        return units

    def joined(self, units: Sequence[_Unit]) -> list[_Unit]:
        """A rank's members, those of one group together again."""
        members = sorted(index for unit in units for index in unit.indices)
        groups = itertools.groupby(members, key=lambda i: self.items[i].group)
        return [unit for _, group in groups for unit in self.of_group(list(group))]

    def unit(self, members: Sequence[int]) -> _Unit:
        """Members of one group as a unit."""
        prompt = self.items[members[0]].prompt_tokens
        responses = [self.items[index].response_tokens for index in members]
        shares = [max(self.items[index].share, _SMALLEST_SHARE) for index in members]
        parts = (share * self.costs[index][1] for share, index in zip(shares, members, strict=True))
        first, _, again = self.costs[members[0]]
        cost = max(shares) * first + sum(parts) + (sum(shares) - max(shares)) * again
        prompts = len(members) if self.repeated else 1
        return _Unit(tuple(members), prompts * prompt + sum(responses), prompt + max(responses), round(cost))


def plan_batch(
    items: Sequence[PlanItem],
    *,
    token_budget: int,
    ranks: int = 1,
    minibatches: int = 1,
    packing: Packing = Packing.SHARED,
    cost: SequenceCost = sequence_cost,
    whole_groups: bool = False,
) -> BatchPlan:
    """Divides a batch into minibatches, ranks and micro-batches.

    Args:
        items: the batch.
        token_budget: tokens per micro-batch.
        ranks: data-parallel ranks.
        minibatches: optimizer steps per pass; at most one per group is made.
        packing: how the models compute a micro-batch.
        cost: by which ranks are balanced, that of the models.
        whole_groups: each group is computed in one micro-batch.
    """
    groups = [list(members) for _, members in itertools.groupby(range(len(items)), key=lambda i: items[i].group)]
    count = min(minibatches, max(len(groups), 1))
    prompts = np.array([item.prompt_tokens for item in items], dtype=np.int64)
    responses = np.array([item.response_tokens for item in items], dtype=np.int64)
    none, repeated = np.zeros_like(prompts), packing is Packing.REPEATED
    again = cost(none, none, prompts) if repeated else none
    costs = zip(
        *(part.tolist() for part in (cost(prompts, none, none), cost(responses, prompts, none), again)), strict=True
    )
    builder = _UnitBuilder(items, token_budget, repeated, whole_groups, list(costs))
    steps = []
    for m in range(count):
        share = groups[m * len(groups) // count : (m + 1) * len(groups) // count]
        if packing is Packing.ROWS:
            members = share if whole_groups else [[index] for group in share for index in group]
            by_rank = _shared_out([builder.unit(together) for together in members], ranks)
        else:
            by_rank = _groups_by_rank(builder, share, ranks)
        divide = _rows if packing is Packing.ROWS else _micro_batches
        steps.append(tuple(divide(units, token_budget) for units in by_rank))
    return BatchPlan(tuple(steps))


def _groups_by_rank(builder: _UnitBuilder, groups: Sequence[Sequence[int]], ranks: int) -> list[list[_Unit]]:
    """The units of every rank: whole groups, or where these do not come out even, large ones divided."""
    units = [unit for group in groups for unit in builder.of_group(group)]
    division = _shared_out(units, ranks)
    mean = sum(unit.cost for unit in units) / ranks
    if builder.whole or _largest(division) <= _UNEVEN * mean:
        return division
    pieces: list[_Unit] = []
    for unit in units:
        # Units that are small compared with a rank's part do not make it uneven.
        large = unit.cost > (_UNEVEN - 1.0) * mean
        pieces += [builder.unit([index]) for index in unit.indices] if large else [unit]
    divided = [builder.joined(part) for part in _shared_out(pieces, ranks)]
    return min(division, divided, key=_largest)


def _shared_out(units: Sequence[_Unit], ranks: int) -> list[list[_Unit]]:
    return [[units[i] for i in chosen] for chosen in partition([unit.cost for unit in units], ranks)]


def _largest(division: Iterable[Sequence[_Unit]]) -> int:
    return max(sum(unit.cost for unit in units) for units in division)


def _micro_batches(units: Sequence[_Unit], budget: int) -> tuple[MicroBatchPlan, ...]:
    costs = [unit.tokens for unit in units]
    parts = max(1, -(-sum(costs) // budget))
    while True:
        division = [part for part in partition(costs, parts) if part]
        if all(len(part) == 1 or sum(costs[i] for i in part) <= budget for part in division):
            return tuple(tuple(index for i in part for index in units[i].indices) for part in division)
        parts += 1


def _rows(units: Sequence[_Unit], budget: int) -> tuple[MicroBatchPlan, ...]:
    """The longest first: all rows of a micro-batch are as long as its first."""
    micro_batches: list[list[int]] = []
    longest = 0
    for unit in sorted(units, key=lambda unit: unit.longest, reverse=True):
        if not micro_batches or (len(micro_batches[-1]) + len(unit.indices)) * longest > budget:
            micro_batches.append([])
            longest = unit.longest
        micro_batches[-1].extend(unit.indices)
    return tuple(tuple(members) for members in micro_batches)
