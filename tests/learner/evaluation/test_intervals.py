"""Confidence intervals over prompts against the bootstrap in full: all draws of few prompts."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollmesh.learner.evaluation.intervals as module
from rollmesh.learner.evaluation.intervals import estimate_mean

_FEW = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=5)


def below(means: list[float], share: float) -> float:
    return float(np.quantile(means, share, method="lower"))


def above(means: list[float], share: float) -> float:
    return float(np.quantile(means, share, method="higher"))


@given(_FEW.filter(lambda values: len(set(values)) > 1))
def test_an_interval_is_that_of_all_draws(values: list[float]) -> None:
    means = [sum(drawn) / len(drawn) for drawn in itertools.product(values, repeat=len(values))]
    found = estimate_mean(values)
    assert found.low is not None
    assert found.high is not None
    # As many draws as are made leave the ends uncertain by less than a percent of them.
    assert below(means, 0.01) - 1e-9 <= found.low <= above(means, 0.04) + 1e-9
    assert below(means, 0.96) - 1e-9 <= found.high <= above(means, 0.99) + 1e-9
    assert found.value == pytest.approx(np.mean(values))


@given(_FEW, st.randoms(use_true_random=False))
def test_the_order_of_prompts_changes_nothing(values: list[float], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert estimate_mean(shuffled) == estimate_mean(values)


@pytest.mark.parametrize("values", [[0.3], [1.0, 1.0, 1.0]])
def test_one_prompt_and_equal_values_say_nothing_about_others(values: list[float]) -> None:
    found = estimate_mean(values)
    assert (found.value, found.prompts, found.low, found.high) == (pytest.approx(values[0]), len(values), None, None)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        found = estimate_mean((rng.random(80) < 0.3).astype(float).tolist())
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.3 <= found.high
    assert held / 200 == pytest.approx(0.95, abs=0.04)


@pytest.mark.parametrize("limits", [{"_COUNTED": 1000}, {"_BLOCK": 1}, {"_DRAWN": 10}])
def test_every_way_to_an_interval_finds_the_same(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).exponential(size=400).tolist()
    found = estimate_mean(values)
    for name, limit in limits.items():
        monkeypatch.setattr(module, name, limit)
    other = estimate_mean(values)
    assert found.low is not None
    assert found.high is not None
    assert other.value == found.value
    assert other.low == pytest.approx(found.low, abs=0.1 * (found.high - found.low))
    assert other.high == pytest.approx(found.high, abs=0.1 * (found.high - found.low))


@pytest.mark.parametrize("count", [10_000, 100_000])
def test_memory_does_not_grow_with_draws(count: int) -> None:
    values = np.random.default_rng(3).random(count).tolist()
    tracemalloc.start()
    try:
        estimate_mean(values)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
