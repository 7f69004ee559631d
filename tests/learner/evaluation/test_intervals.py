"""Confidence intervals over prompts against the bootstrap in full: all draws of few prompts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
