"""Losses on pairs of responses."""

from __future__ import annotations

import math

import pytest
import torch

from rollmesh.learner.algorithms.losses.preference import (
    bradley_terry,
    dpo_ipo,
    dpo_sigmoid,
    kto,
    pair_margins,
    response_log_ratios,
)
from rollmesh.learner.algorithms.ragged import segment_sum
from rollmesh.learner.algorithms.settings import SettingsError
from tests.learner.algorithms.samples import sample


def test_margins_are_the_difference_of_the_responses_log_ratios():
    data = sample([3, 2, 1, 4])
    drift = data.log_probs - data.anchor
    tokens = data.tokens
    reference = segment_sum(data.anchor, tokens.sequence_ids, 4)
    ratios = response_log_ratios(data.log_probs, reference, tokens.sequence_ids, tokens.sequence_lengths)
    torch.testing.assert_close(ratios, torch.stack([part.sum() for part in drift.split([3, 2, 1, 4])]))
    torch.testing.assert_close(pair_margins(ratios), torch.stack([ratios[0] - ratios[1], ratios[2] - ratios[3]]))


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


def test_kto_moves_good_and_bad_responses_apart():
    ratios = torch.tensor([3.0, 3.0, -1.0], dtype=torch.float64, requires_grad=True)
    good = torch.tensor([True, False, False])
    loss = kto(ratios, good, 1.0, beta=0.5)
    expected = [1 - _sigmoid(1.0), 1 - _sigmoid(-1.0), 1 - _sigmoid(1.0)]
    torch.testing.assert_close(loss.detach(), torch.tensor(expected, dtype=torch.float64))
    (slopes,) = torch.autograd.grad(loss.sum(), ratios)
    assert (slopes < 0).tolist() == [True, False, False]


def test_a_reward_model_is_paid_for_the_margin_and_kept_around_zero():
    scores = torch.tensor([2.0, 0.5, -1.0, 1.0], dtype=torch.float64)
    margins = torch.tensor([0.0, 1.0], dtype=torch.float64)
    expected = [-math.log(_sigmoid(1.5)), -math.log(_sigmoid(-3.0))]
    torch.testing.assert_close(bradley_terry(scores, margins), torch.tensor(expected, dtype=torch.float64))
    centered = bradley_terry(scores, margins, centering=0.1) - bradley_terry(scores, margins)
    torch.testing.assert_close(centered, torch.tensor([0.1 * 2.5**2, 0.0], dtype=torch.float64))
    with pytest.raises(SettingsError, match="centering"):
        bradley_terry(scores, margins, centering=-1.0)


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


@pytest.mark.parametrize("function", [dpo_sigmoid, dpo_ipo])
def test_beta_must_be_positive(function):
    with pytest.raises(SettingsError, match="beta"):
        function(torch.zeros(1), beta=0.0)
