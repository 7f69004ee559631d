"""Centring, scaling and whitening."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rollmesh.learner.algorithms.advantages.components import combine
from rollmesh.learner.algorithms.advantages.normalization import Level, centre, normalize
from rollmesh.learner.algorithms.advantages.returns import following_values, generalized_advantages, lambda_returns
from rollmesh.learner.algorithms.advantages.whitening import whiten

NAN = float("nan")


@given(values=st.lists(st.floats(-100, 100), min_size=2, max_size=20))
@example(values=[-71.0, -70.5])
def test_whitened_values_have_mean_zero_and_variance_one(values: list[float]):
    data = torch.tensor(values, dtype=torch.float64)
    result = whiten(data)
    if data.std() > 1e-2:
        # The count that the mean is divided by has verl's slack of 1e-8.
        assert abs(float(result.mean())) < 1e-9 + 1e-8 * abs(float(data.mean() / data.std()))
        assert float(result.var()) == pytest.approx(1.0, abs=1e-3)
    assert result.isfinite().all()


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 7])
def test_values_without_spread_are_whitened_to_exactly_zero(values: list[float]):
    for dtype in (torch.float32, torch.float64):
        assert not whiten(torch.tensor(values, dtype=dtype)).any()


def test_epsilon_guards_the_variance_or_the_deviation():
    values = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert float(whiten(values, epsilon=2.0)[1]) == pytest.approx(0.5)
    assert float(whiten(values, epsilon=2.0, guard="deviation")[1]) == pytest.approx(1 / (2**0.5 + 2))


def test_left_out_values_have_no_influence():
    keep = torch.tensor([True, True, False, True])
    values = torch.tensor([1.0, 2.0, 1e6, 6.0], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, keep=keep)[keep], whiten(values[keep]))


def test_the_mean_can_stay():
    values = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, shift_mean=False), whiten(values) + 3.0)


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("none", "none", [0.0, 2.0, 4.0, 10.0]),
        ("group", "none", [-1.0, 1.0, -3.0, 3.0]),
        ("batch", "none", [-4.0, -2.0, 0.0, 6.0]),
        ("group", "group", [-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5]),
        ("batch", "batch", [value / (56 / 3) ** 0.5 for value in (-4.0, -2.0, 0.0, 6.0)]),
        ("group", "batch", [value / (56 / 3) ** 0.5 for value in (-1.0, 1.0, -3.0, 3.0)]),
    ],
)
def test_levels(mean: Level, std: Level, expected: list[float]):
    values, groups = torch.tensor([0.0, 2.0, 4.0, 10.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    result = normalize(values, groups, 2, mean=mean, std=std, epsilon=0.0)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


def test_the_deviation_can_be_taken_around_what_was_subtracted():
    values, groups = torch.tensor([0.0, 2.0, 4.0, 10.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    result = normalize(values, groups, 2, std="batch", epsilon=0.0, around="subtracted")
    torch.testing.assert_close(result, torch.tensor([-1.0, 1.0, -3.0, 3.0], dtype=torch.float64) / (20 / 3) ** 0.5)


def test_what_does_not_apply_enters_no_statistic():
    groups = torch.tensor([0, 0, 0, 1, 1])
    values = torch.tensor([1.0, NAN, 3.0, NAN, NAN])
    torch.testing.assert_close(centre(values, groups, 2), torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(centre(values, groups, 2, leave_one_out=True), torch.tensor([-2.0, 0.0, 2.0, 0.0, 0.0]))


def test_components_are_summed_where_they_apply():
    components = torch.tensor([[1.0, NAN, NAN], [2.0, 4.0, NAN]])
    combined = combine(components, torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(combined, torch.tensor([2.0, 2.0, NAN]), equal_nan=True)


def test_lambda_returns_are_values_plus_generalized_advantages():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 0, 1, 7])
    rewards, values = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(2))
    following = following_values(values, lengths, torch.tensor([0.5, 0.0, -1.0, 2.0], dtype=torch.float64))
    returns = lambda_returns(rewards, following, lengths, discounts=0.9, lam=0.7)
    advantages = generalized_advantages(rewards, values, following, lengths, discounts=0.9, lam=0.7)
    torch.testing.assert_close(returns, advantages + values)


def test_nothing_passes_an_end_or_a_cut():
    """A termination drops what follows; a cut keeps its value and drops the rest."""
    lengths, ones = torch.tensor([3]), torch.ones(3, dtype=torch.float64)
    following = torch.tensor([10.0, 10.0, 10.0], dtype=torch.float64)
    ended = lambda_returns(ones, following, lengths, discounts=torch.tensor([0.0, 1.0, 1.0]).double(), lam=1.0)
    cut = lambda_returns(
        ones, following, lengths, discounts=1.0, lam=1.0, continuations=torch.tensor([0.0, 1.0, 1.0]).double()
    )
    assert ended.tolist() == [1.0, 12.0, 11.0]
    assert cut.tolist() == [11.0, 12.0, 11.0]
