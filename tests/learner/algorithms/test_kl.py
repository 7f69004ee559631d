"""KL estimators: values, gradients, finiteness, and the adaptive coefficient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.algorithms.kl import ESTIMATORS, KLSettings, kl_estimate, kl_rewards, next_coefficient
from rollmesh.learner.algorithms.settings import SettingsError, parse

NAMES = [*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS)]
LOG_PROBS = st.lists(
    st.tuples(st.floats(-1e30, 0) | st.just(-math.inf), st.floats(-1e30, 0) | st.just(-math.inf)), max_size=8
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(pairs=LOG_PROBS)
def test_values_and_gradients_are_finite(dtype, pairs):
    log_probs = torch.tensor([a for a, _ in pairs], dtype=dtype, requires_grad=True)
    reference = torch.tensor([b for _, b in pairs], dtype=dtype)
    for name in NAMES:
        estimate = kl_estimate(log_probs, reference, name)
        (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
        assert estimate.dtype == dtype, name
        assert estimate.isfinite().all(), name
        assert gradient.isfinite().all(), name
        if name.startswith(("k2", "k3", "abs")):
            assert (estimate >= -1e-6).all(), name


@pytest.mark.parametrize("name", ESTIMATORS)
def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other(name):
    # A log-ratio of 40 is beyond k3's cuts: its own gradient is 0 there.
    log_probs = torch.tensor([-1.0, -0.5, -40.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.3, -2.0, 0.0], dtype=torch.float64)
    plain, through = kl_estimate(log_probs, reference, name), kl_estimate(log_probs, reference, f"{name}+")
    torch.testing.assert_close(through, plain, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(through.sum(), log_probs)
    torch.testing.assert_close(gradient, (log_probs - reference).detach())


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_over_samples_of_the_policy(name):
    logits = torch.tensor([0.3, -0.4, 0.8, 0.0], dtype=torch.float64)
    other = torch.tensor([0.1, 0.2, 0.5, -0.3], dtype=torch.float64)
    policy, reference = torch.log_softmax(logits, 0), torch.log_softmax(other, 0)
    expected = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, name)).sum(), expected)


def test_the_gradient_of_k2_is_that_of_the_divergence():
    logits = torch.tensor([0.3, -0.4, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.2, 0.5, -0.3], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    sampled = (policy.exp().detach() * kl_estimate(policy, reference, "k2")).sum()
    torch.testing.assert_close(torch.autograd.grad(sampled, logits)[0], exact)


@pytest.mark.parametrize(("alias", "name"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+")])
def test_aliases(alias, name):
    a, b = -torch.rand(5), -torch.rand(5)
    assert torch.equal(kl_estimate(a, b, alias), kl_estimate(a, b, name))


def test_bound_cuts_every_estimator():
    log_probs, reference = torch.tensor([-0.1, -30.0]), torch.tensor([-30.0, -0.1])
    for name in ESTIMATORS:
        assert kl_estimate(log_probs, reference, name, bound=5.0).abs().max() == 5.0
    assert kl_estimate(log_probs, reference, "k3").max() == 10.0, "by default k3 alone is cut"
    assert kl_estimate(log_probs, reference, "k1").max() > 29.0


def test_rewards_take_the_penalty_away():
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    rewards = kl_rewards(policy, torch.tensor([-1.5, -1.0]), KLSettings(where="reward"), 0.1)
    assert not rewards.requires_grad
    torch.testing.assert_close(rewards, torch.tensor([-0.05, 0.1]))


def test_the_estimator_by_default_depends_on_the_place():
    assert KLSettings().in_reward == "k1"
    assert KLSettings().in_loss == "k3"
    named = parse(KLSettings, {"where": "loss", "estimator": "k2+"})
    assert named.in_loss == named.in_reward == "k2+"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"estimator": "k4"}, "estimator"),
        ({"coefficient": -1}, "coefficient"),
        ({"target": 0}, "target"),
        ({"horizon": 0}, "horizon"),
        ({"where": "reward", "unbiased": True}, "unbiased"),
    ],
)
def test_settings_out_of_range_are_named(values, field):
    with pytest.raises(SettingsError) as error:
        parse(KLSettings, values, "algorithm.kl")
    assert error.value.field == f"algorithm.kl.{field}"


@given(coefficient=st.floats(1e-6, 10), kl=st.floats(0, 100), steps=st.integers(1, 10_000), target=st.floats(1e-4, 10))
def test_the_coefficient_moves_towards_the_target(coefficient, kl, steps, target):
    after = next_coefficient(coefficient, kl, steps, target=target, horizon=10_000)
    assert after >= coefficient if kl >= target else after <= coefficient
    assert 0.8 * coefficient <= after * (1 + 1e-12)
    assert after <= 1.2 * coefficient * (1 + 1e-12)


def test_the_controller_holds_a_policy_at_the_target():
    # A policy whose KL is inversely proportional to the coefficient, as under a quadratic penalty.
    coefficient = 1.0
    for _ in range(400):
        coefficient = next_coefficient(coefficient, 0.02 / coefficient, 100, target=0.1, horizon=1000)
    assert 0.02 / coefficient == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_batch_without_a_figure_leaves_the_coefficient(kl):
    assert next_coefficient(0.3, kl, 10, target=0.1, horizon=100) == 0.3
