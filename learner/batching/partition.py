"""Dividing items over ranks and micro-batches so that the largest part is as small as can be.

First comes the largest differencing method (Karmarkar and Karp, "The differencing method of set partitioning", 1982).
Then items are exchanged out of the largest part while that helps. Invariants: every index stands in exactly one part.
With at least as many items as parts none is empty. The same input gives the same division on every rank.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Count = TypeVar("_Count", int, NDArray[np.int64])
_Part = tuple[int, tuple[int, ...]]
"""Sum of the costs, and the indices."""


def sequence_cost(
    tokens: _Count, context: _Count | int = 0, again: _Count | int = 0, *, hidden_size: int = 4096
) -> _Count:
    """Relative time of a layer on a sequence where no model is given: products are linear in its length, attention
    square. `ModelCost.sequence_flops` knows a model's own sizes.

    A layer of width h takes 24 h^2 L + 4 h L^2 floating point operations on L tokens: 4 h times 6 h L + L^2. With a
    context of C tokens in front (a prompt computed once for several responses), attention looks at both: L (L + 2 C).
    So the costs of prompt and response add up to that of the whole.

    Args:
        tokens: L, of one sequence or of several.
        context: C, tokens that are attended to but computed elsewhere.
        again: tokens that layers with a state would compute in addition; this layer has no state.
        hidden_size: h; where it is not known, that of an 8B model.
    """
    del again
    return 6 * hidden_size * tokens + tokens * (tokens + 2 * context)


def partition(costs: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Divides items into parts of nearly equal cost.

    Args:
        costs: cost per item, not negative.
        parts: number of parts.
        equal_size: all parts have the same number of items, or, where that does not come out even, differ by one.

    Returns:
        Indices per part, ascending. Parts are empty only where there are fewer items than parts.
    """
    if parts == 1:
        return [list(range(len(costs)))]
    return [sorted(members) for members in _exchanged(costs, _differenced(costs, parts, equal_size), equal_size)]


def _differenced(costs: Sequence[int], parts: int, equal_size: bool) -> list[list[int]]:
    """The largest differencing method: partial divisions are merged, largest part with smallest."""
    order = sorted(range(len(costs)), key=costs.__getitem__)
    # One item per division; for equal sizes, one item for every part of it.
    width = parts if equal_size else 1
    heap: list[tuple[int, int, int, list[_Part]]] = []
    for start in range(0, len(order), width):
        division: list[_Part] = [(costs[i], (i,)) for i in order[start : start + width]]
        division += [(0, ())] * (parts - len(division))
        heap.append(_entry(division, len(heap)))
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        heapq.heappush(heap, _entry(merged, age))
        age += 1
    return [list(members) for _, members in heap[0][-1]] if heap else [[] for _ in range(parts)]


def _entry(division: list[_Part], age: int) -> tuple[int, int, int, list[_Part]]:
    """A heap entry: the division with the largest difference first, then the largest part, then the oldest."""
    # By number too: parts without items stand last even among items without cost, and so are filled first.
    division.sort(key=lambda part: (-part[0], -len(part[1])))
    return division[-1][0] - division[0][0], -division[0][0], age, division


def _exchanged(costs: Sequence[int], division: list[list[int]], equal_size: bool) -> list[list[int]]:
    """Moves an item out of the largest part, or swaps two, as long as the two parts come closer to one another.

    Every step lowers the sum of squares, so it ends.
    """
    key = costs.__getitem__
    sums = [sum(map(key, members)) for members in division]
    for members in division:
        members.sort(key=key)
    while True:
        largest = max(range(len(sums)), key=sums.__getitem__)
        for other in sorted(range(len(sums)), key=sums.__getitem__):
            exchange = _exchange(costs, division[largest], division[other], sums[largest] - sums[other], equal_size)
            if exchange is not None:
                break
        else:
            return division
        given, taken = exchange
        division[largest].remove(given)
        bisect.insort(division[other], given, key=key)
        change = costs[given]
        if taken is not None:
            division[other].remove(taken)
            bisect.insort(division[largest], taken, key=key)
            change -= costs[taken]
        sums[largest] -= change
        sums[other] += change


def _exchange(
    costs: Sequence[int], source: list[int], target: list[int], gap: int, equal_size: bool
) -> tuple[int, int | None] | None:
    """The exchange between `source` and `target` that halves the gap between them best; None: nothing helps."""
    best: tuple[int, int, int | None] | None = None
    sizes = [costs[i] for i in target]
    for given in source:
        # A swap changes the gap by twice the difference of the two items: it should be half the gap.
        near = bisect.bisect_left(sizes, costs[given] - gap / 2)
        options: list[int | None] = [target[j] for j in (near - 1, near) if 0 <= j < len(target)]
        if not equal_size and len(source) > 1:
            options.append(None)
        for taken in options:
            change = costs[given] - (0 if taken is None else costs[taken])
            off = abs(2 * change - gap)
            if 0 < change < gap and (best is None or off < best[0]):
                best = (off, given, taken)
    return best[1:] if best is not None else None
