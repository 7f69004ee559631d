"""Losses on pairs of responses."""

from __future__ import annotations

import math

import pytest
import torch

from rollmesh.learner.algorithms.losses.preference import dpo_ipo, dpo_sigmoid, pair_margins
from rollmesh.learner.algorithms.settings import SettingsError
from tests.learner.algorithms.samples import sample


def test_margins_are_the_difference_of_the_responses_log_ratios():
    data = sample([3, 2, 0, 4])
    drift = data.log_probs - data.anchor
    tokens = data.tokens
    sums = pair_margins(data.log_probs, data.anchor, tokens.sequence_ids, 4)
    torch.testing.assert_close(sums, torch.stack([drift[:3].sum() - drift[3:5].sum(), -drift[5:].sum()]))
    means = pair_margins(data.log_probs, data.anchor, tokens.sequence_ids, 4, per_token=True)
    torch.testing.assert_close(means, torch.stack([drift[:3].mean() - drift[3:5].mean(), -drift[5:].mean()]))


def test_dpo_prefers_the_chosen_response():
    margins = torch.tensor([0.0, 2.0, -2.0, 1e6, -1e6], dtype=torch.float64, requires_grad=True)
    loss = dpo_sigmoid(margins, beta=0.5)
    expected = [math.log(2.0), math.log1p(math.exp(-1.0)), math.log1p(math.exp(1.0)), 0.0, 5e5]
    torch.testing.assert_close(loss.detach(), torch.tensor(expected, dtype=torch.float64))
    (slopes,) = torch.autograd.grad(loss.sum(), margins)
    assert torch.isfinite(slopes).all()
    assert slopes[0].item() == pytest.approx(-0.25)


def test_ipo_pulls_the_margin_to_a_fixed_one():
    margins = torch.tensor([5.0, 4.0, 7.0], dtype=torch.float64)
    assert dpo_ipo(margins, beta=0.1).tolist() == [0.0, 1.0, 4.0]


@pytest.mark.parametrize("function", [dpo_sigmoid, dpo_ipo])
def test_beta_must_be_positive(function):
    with pytest.raises(SettingsError, match="beta"):
        function(torch.zeros(1), beta=0.0)
