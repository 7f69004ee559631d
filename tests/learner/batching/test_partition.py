"""Partitions: every item once, balanced, no part empty, equal sizes where asked."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.batching.partition import partition, sequence_cost

COSTS = st.lists(st.integers(0, 100), min_size=0, max_size=30)


@given(costs=COSTS, parts=st.integers(1, 6))
def test_every_item_once_balanced_and_no_part_empty(costs, parts):
    division = partition(costs, parts)
    assert len(division) == parts
    assert sorted(i for part in division for i in part) == list(range(len(costs)))
    sums = [sum(costs[i] for i in part) for part in division]
    assert max(sums, default=0) - min(sums, default=0) <= max(costs, default=0)
    if len(costs) >= parts:
        assert all(division)
    assert partition(costs, parts) == division


@given(costs=COSTS, parts=st.integers(1, 6))
def test_equal_sizes_differ_by_one_at_most(costs, parts):
    division = partition(costs, parts, equal_size=True)
    assert sorted(i for part in division for i in part) == list(range(len(costs)))
    sizes = [len(part) for part in division]
    assert max(sizes) - min(sizes) <= 1


def test_exchanges_find_what_differencing_alone_misses():
    # Differencing ends at 16 and 14; 8 + 7 against 6 + 5 + 4 is even.
    costs = [8, 7, 6, 5, 4]
    assert sorted(sum(costs[i] for i in part) for part in partition(costs, 2)) == [15, 15]


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=8), parts=st.integers(2, 3))
def test_within_the_known_bound_of_the_best_division(costs, parts):
    best = min(
        max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == part) for part in range(parts))
        for owners in itertools.product(range(parts), repeat=len(costs))
    )
    found = max(sum(costs[i] for i in part) for part in partition(costs, parts))
    # Differencing alone is within 4/3 - 1/(3 (parts - 1)) of the best (Michiels et al., 2003).
    assert found * 3 <= best * 4


def test_fewer_items_than_parts_leave_parts_empty():
    assert sorted(partition([3], 3)) == [[], [], [0]]
    assert partition([], 2) == [[], []]


@pytest.mark.parametrize(("prompt", "response"), [(0, 7), (100, 1), (512, 2048)])
def test_costs_of_prompt_and_response_add_up(prompt, response):
    whole = sequence_cost(prompt + response, hidden_size=64)
    assert sequence_cost(prompt, hidden_size=64) + sequence_cost(response, prompt, hidden_size=64) == whole
