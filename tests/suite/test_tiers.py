"""Products, of which a part that covers all pairs runs in the first tier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests.suite.tiers import covering

_AXES = {"engine": ("a", "b", "c"), "layout": (1, 2, 3), "dtype": ("bf16", "fp32"), "policy": (0, 1, 2)}


def _first_tier(mark: pytest.MarkDecorator) -> list[Sequence[object]]:
    return [param.values for param in mark.args[1] if not param.marks]


def test_the_first_tier_has_every_pair_in_fewer_rows() -> None:
    mark = covering(**_AXES)
    assert [param.values for param in mark.args[1]] == list(itertools.product(*_AXES.values()))
    rows = _first_tier(mark)
    assert len(rows) <= 12
    for (first, ones), (second, others) in itertools.combinations(enumerate(_AXES.values()), 2):
        assert {(row[first], row[second]) for row in rows} == set(itertools.product(ones, others))


def test_a_pair_that_exists_is_covered_where_others_do_not() -> None:
    mark = covering(lambda engine, layout, **_: engine != "a" or layout == 1, **_AXES)
    rows = [param.values for param in mark.args[1]]
    assert ("a", 2) not in {row[:2] for row in rows}
    assert {row[:2] for row in rows} == {row[:2] for row in _first_tier(mark)}
