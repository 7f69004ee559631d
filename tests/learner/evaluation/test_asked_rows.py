"""The share of each source in the rows that are asked."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.evaluation.asked_rows import asked_rows


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 50))
def test_sources_share_the_rows_evenly_and_a_larger_limit_only_adds(sizes: list[int], limit: int) -> None:
    rows = asked_rows(sizes, limit)
    assert len(rows) == min(limit, sum(sizes))
    counts = []
    for (start, end), size in zip(pairwise(accumulate(sizes, initial=0)), sizes, strict=True):
        own = [row for row in rows if start <= row < end]
        assert own == list(range(start, start + len(own))), "its first rows"
        counts.append((len(own), size))
    assert all(one >= max(count for count, _ in counts) - 1 for one, size in counts if one < size)
    assert set(rows) <= set(asked_rows(sizes, limit + 1))


@pytest.mark.parametrize(
    ("sizes", "limit", "rows"),
    [([4], 3, [0, 1, 2]), ([2, 3], None, [0, 1, 2, 3, 4]), ([5, 5], 2, [0, 5]), ([1, 5, 5], 5, [0, 1, 2, 6, 7])],
)
def test_rows_by_hand(sizes: list[int], limit: int | None, rows: list[int]) -> None:
    assert asked_rows(sizes, limit) == rows
