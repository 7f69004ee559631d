"""Resampling: weights by hand, draws in proportion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.algorithms.dataflows.resampling import ResampleSettings, pf_ppo_weights, resample
from rollmesh.learner.algorithms.settings import SettingsError, parse


@pytest.mark.parametrize(
    ("method", "expected"),
    [("none", [1, 1, 1, 1]), ("pow", [4, 0, 1, 4]), ("max_min", [1, 0, 0, 1]), ("max_random", [0.1, 0.1, 0.1, 0.4])],
)
def test_weights_by_hand(method, expected):
    scores = torch.tensor([-2.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    weights = pf_ppo_weights(scores, method, 2.0)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-8)
    assert (weights > 0).all()


@given(scores=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=12))
def test_as_many_draws_as_sequences_whatever_the_scores(scores):
    for method in ("none", "pow", "max_min", "max_random"):
        repeats = resample(pf_ppo_weights(torch.tensor(scores), method), torch.Generator().manual_seed(0))
        assert repeats.dtype == torch.int64, method
        assert repeats.numel() == len(scores), method
        assert int(repeats.sum()) == len(scores), method


def test_draws_follow_the_weights_and_the_seed():
    weights = torch.tensor([0.0, 1.0, 3.0]).repeat(1000)
    repeats = resample(weights, torch.Generator().manual_seed(7))
    assert torch.equal(repeats, resample(weights, torch.Generator().manual_seed(7)))
    never, once, often = repeats.reshape(1000, 3).sum(0).tolist()
    assert never == 0
    assert often / once == pytest.approx(3.0, rel=0.15)


def test_weights_of_zero_count_alike_and_infinite_ones_take_all():
    assert int(resample(torch.zeros(5)).sum()) == 5
    assert resample(torch.tensor([1.0, torch.inf, 1.0])).tolist() == [0, 3, 0]


def test_a_negative_power_is_refused():
    with pytest.raises(SettingsError):
        parse(ResampleSettings, {"method": "pow", "weight_pow": -1.0})
