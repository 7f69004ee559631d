"""The sequences and tokens that a loss is applied to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rollmesh.learner.algorithms.losses.modifiers import off_policy_sequence_keep, top_entropy_selection
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import StepView
from tests.learner.algorithms.samples import sample


def test_bad_sequences_that_the_policy_has_left_are_dropped():
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    tokens = sample([2, 2, 0, 2], advantages=advantages).tokens
    # Mean drifts: 0.3, 0.3, -, 0.1; only the first has a negative advantage and more than 0.2.
    moved = tokens.behaviour_log_probs - torch.tensor([0.6, 0.0, 0.3, 0.3, 0.2, 0.0], dtype=torch.float64)
    assert off_policy_sequence_keep(moved, tokens, 0.2).tolist() == [False, False, True, True, True, True]
    assert off_policy_sequence_keep(moved, tokens, 0.4).all()


def test_a_sequence_may_be_dropped_in_part_where_its_advantages_differ():
    tokens = sample([4], advantages=torch.tensor([-1.0, 1.0, -1.0, 0.0], dtype=torch.float64)).tokens
    kept = off_policy_sequence_keep(tokens.behaviour_log_probs - 1.0, tokens, 0.5)
    assert kept.tolist() == [False, True, False, True]


def test_one_impossible_token_drops_its_sequence_and_no_other():
    tokens = sample([2, 2], advantages=torch.full((4,), -1.0, dtype=torch.float64)).tokens
    policy = tokens.behaviour_log_probs.clone()
    policy[1] = -math.inf
    assert off_policy_sequence_keep(policy, tokens, 0.5).tolist() == [False, False, True, True]
    both = replace(tokens, behaviour_log_probs=policy)
    assert off_policy_sequence_keep(policy, both, 0.5).all()


def view(entropy: torch.Tensor) -> StepView:
    return StepView(-entropy, entropy, -entropy, torch.ones_like(entropy))


@pytest.mark.parametrize("count", [1, 2, 5, 10, 101])
@pytest.mark.parametrize("quantile", [0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_of_highest_entropy_are_selected(count, quantile, dtype):
    entropy = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=dtype)
    selected = top_entropy_selection(view(entropy), quantile=quantile)
    assert selected.tolist() == (entropy >= torch.quantile(entropy, 1.0 - quantile)).tolist()
    assert selected.any()


def test_all_are_selected_where_all_entropies_are_equal_and_none_of_none():
    assert top_entropy_selection(view(torch.full((7,), 0.5))).all()
    assert top_entropy_selection(view(torch.zeros(0))).shape == (0,)


def test_a_share_out_of_range_is_refused():
    with pytest.raises(SettingsError, match="quantile"):
        top_entropy_selection(view(torch.ones(3)), quantile=0.0)
