"""Every two values of different settings meet in some run."""

from itertools import combinations, product

import pytest

from benchmarks.faults.chaos import AXES, possible
from tests.faults.combinations import covering


def test_every_possible_pair_of_settings_is_run_and_nothing_impossible() -> None:
    chosen = covering(AXES, possible)
    assert all(possible(one) for one in chosen)
    assert len(chosen) < 16
    for (first, values), (second, others) in combinations(AXES.items(), 2):
        for value, other in product(values, others):
            if (first, value, second, other) != ("staleness", 0, "max_reuse", 2):
                assert any(one[first] == value and one[second] == other for one in chosen), (
                    first,
                    value,
                    second,
                    other,
                )


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_the_set_is_the_same_each_time(order: tuple[str, str]) -> None:
    axes = {name: {"a": (1, 2), "b": (3, 4)}[name] for name in order}
    assert covering(axes, lambda _: True) == covering(axes, lambda _: True)
    assert len(covering(axes, lambda _: True)) == 4
