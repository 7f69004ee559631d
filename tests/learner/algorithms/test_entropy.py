"""Entropy: its formula, and the coefficient that follows a target."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.algorithms.entropy import (
    EntropySettings,
    applied_entropy_coefficient,
    entropy_from_logits,
    next_entropy_coefficient,
)
from rollmesh.learner.algorithms.settings import SettingsError, parse
from rollmesh.learner.engines.fsdp2.logprobs import token_log_probs


def test_uniform_and_certain_distributions():
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0], [90.0, 0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    entropy = entropy_from_logits(logits)
    torch.testing.assert_close(entropy, torch.tensor([math.log(4), 0.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_forbidden_tokens_count_nothing():
    allowed = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    logits = torch.cat([allowed, torch.full((1, 2), -torch.inf, dtype=torch.float64)], 1).requires_grad_()
    entropy = entropy_from_logits(logits)
    torch.testing.assert_close(entropy.detach(), entropy_from_logits(allowed))
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert gradient.isfinite().all()
    assert (gradient[:, 3:] == 0).all()


def test_the_engine_computes_the_same():
    logits = (torch.randn(6, 11, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    labels = torch.zeros(6, dtype=torch.int64)
    _, fused = token_log_probs(logits, labels, entropy_gradient=True).policy()
    plain = entropy_from_logits(logits)
    torch.testing.assert_close(fused, plain)
    weights = torch.arange(6.0)
    gradients = [torch.autograd.grad((weights * entropy).sum(), logits)[0] for entropy in (fused, plain)]
    torch.testing.assert_close(*gradients)


def test_no_rows():
    assert entropy_from_logits(torch.zeros(0, 5)).shape == (0,)


@given(coefficient=st.floats(0, 0.1), entropy=st.floats(0, 10))
def test_the_coefficient_steps_towards_the_target_within_its_range(coefficient, entropy):
    settings = EntropySettings(target=0.3, step=0.01, max_coefficient=0.1)
    after = next_entropy_coefficient(coefficient, entropy, settings)
    assert 0 <= after <= 0.1
    assert abs(after - coefficient) <= 0.01 + 1e-12
    assert after >= coefficient if entropy <= 0.3 else after <= coefficient
    assert applied_entropy_coefficient(after, entropy, settings) == (after if entropy <= 0.3 else 0.0)


def test_without_a_target_the_coefficient_stays():
    settings = EntropySettings(coefficient=0.01)
    assert next_entropy_coefficient(0.01, 5.0, settings) == 0.01
    assert applied_entropy_coefficient(0.01, 5.0, settings) == 0.01
    assert next_entropy_coefficient(0.01, math.nan, EntropySettings(target=0.3)) == 0.01


def test_the_bonus_needs_the_gradient_only_where_it_is_used():
    assert not EntropySettings().active
    assert EntropySettings(coefficient=0.01).active
    assert EntropySettings(target=0.2).active


@pytest.mark.parametrize("values", [{"target": 0}, {"step": 0}, {"min_coefficient": 2}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(SettingsError):
        parse(EntropySettings, values)
