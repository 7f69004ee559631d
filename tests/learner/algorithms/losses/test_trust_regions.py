"""Losses that drop tokens, penalize drift or select: dppo_tv, dppo_kl, probability_band, clip_cov, kl_cov, dro, gpg."""

from __future__ import annotations

import math

import pytest
import torch

from rollmesh.learner.algorithms.losses import clip_cov, kl_cov, probability_band, reinforce
from rollmesh.learner.algorithms.losses.covariance import covariances, select_clip_cov, select_kl_cov
from rollmesh.learner.algorithms.registry import POLICY_LOSSES
from rollmesh.learner.algorithms.settings import Component, SettingsError
from rollmesh.learner.algorithms.types import StepView
from tests.learner.algorithms.samples import Sample, gradient, sample, select, token_loss


def one_token(probability: float, anchor: float, advantage: float) -> Sample:
    data = sample([1], advantages=torch.tensor([advantage], dtype=torch.float64))
    return Sample(
        torch.tensor([math.log(probability)], dtype=torch.float64),
        torch.tensor([math.log(anchor)], dtype=torch.float64),
        data.tokens,
    )


def view(data: Sample, seed: int = 0) -> StepView:
    draw = torch.Generator().manual_seed(seed)
    return StepView(data.log_probs, torch.zeros_like(data.anchor), data.anchor, data.tokens.advantages, draw)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(
    ("probability", "anchor", "advantage", "kept"),
    [
        (0.9, 0.2, 1.0, False),
        (0.9, 0.2, -1.0, True),
        (0.1, 0.8, -1.0, False),
        (0.1, 0.8, 1.0, True),
        # A ratio of 50, but hardly any probability: PPO would clip it.
        (0.005, 0.0001, 1.0, True),
        (0.21, 0.2, 1.0, True),
    ],
)
def test_dppo_drops_what_leaves_the_region_and_nothing_that_comes_back(name, probability, anchor, advantage, kept):
    loss, leaf, metrics = token_loss(Component(name), one_token(probability, anchor, advantage))
    slope = -advantage * min(probability / anchor, 20.0) if kept else 0.0
    assert gradient(loss.sum(), leaf).item() == pytest.approx(slope)
    assert int(metrics.sums["actor/pg_clipfrac"]) == (not kept)
    assert int(metrics.sums["actor/pg_clipfrac_lower"]) == (probability / anchor > 20.0)


def test_the_binary_divergence_of_dppo_kl():
    q, p = 0.3, 0.5
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    for bound, kept in ((divergence * 1.01, True), (divergence * 0.99, False)):
        component = Component("dppo_kl", {"clip_high": bound})
        loss, _, _ = token_loss(component, one_token(p, q, 1.0))
        assert bool(loss.detach().any()) == kept


@pytest.mark.parametrize(
    ("by_sign", "probability", "advantage", "kept"),
    [
        (True, 0.8, 3.0, False),
        (True, 0.8, -3.0, True),
        (True, 0.1, -3.0, False),
        (True, 0.1, 3.0, True),
        (False, 0.8, -3.0, False),
        (False, 0.1, 3.0, False),
        (False, 0.1, 0.0, False),
        (False, 0.45, 3.0, True),
    ],
)
def test_the_band_drops_by_sign_or_on_both_sides_and_pulls_everywhere(by_sign, probability, advantage, kept):
    component = Component("probability_band", {"by_sign": by_sign, "penalty": 0.1, "advantage_scale": 2.0})
    loss, leaf, metrics = token_loss(component, one_token(probability, 0.4, advantage))
    ratio = probability / 0.4
    plain = 2.0 * advantage * ratio if kept else 0.0
    assert loss.item() == pytest.approx(0.1 * math.log(ratio) ** 2 - plain)
    assert gradient(loss.sum(), leaf).item() == pytest.approx(0.2 * math.log(ratio) - plain)
    assert int(metrics.sums["actor/is_masked"]) == (not kept)


def test_the_band_without_an_upper_bound():
    loss, _ = probability_band(*_parts(one_token(0.9, 0.1, 1.0)), band_high=None, by_sign=False, penalty=0.0)
    assert loss.item() == pytest.approx(-9.0)


def _parts(data: Sample):
    return data.log_probs, data.anchor, data.tokens


def test_a_large_ratio_of_an_unlikely_token_is_not_cut():
    data = one_token(math.exp(-3.0), math.exp(-33.0), -1.0)
    loss, leaf, _ = token_loss(Component("probability_band", {"penalty": 0.0}), data)
    assert loss.item() == pytest.approx(math.exp(30.0))
    assert gradient(loss.sum(), leaf).item() == pytest.approx(math.exp(30.0))


def test_kl_cov_penalizes_the_tokens_of_largest_covariance():
    data = sample([5, 6, 4], seed=7)
    chosen = select_kl_cov(view(data), share=0.2)
    assert int(chosen.sum()) == 3
    cov = covariances(view(data))
    assert cov[chosen].min() >= cov[~chosen].max()
    data.tokens.selected = chosen
    loss, leaf, _ = token_loss(Component("kl_cov", {"share": 0.2, "coefficient": 0.7}), data)
    drift = data.log_probs - data.anchor
    advantages = data.tokens.advantages
    torch.testing.assert_close(loss.detach(), -advantages * drift.exp() + 0.7 * drift.abs() * chosen)
    torch.testing.assert_close(gradient(loss.sum(), leaf), -advantages * drift.exp() + 0.7 * drift.sign() * chosen)


def test_at_least_one_token_is_selected_and_none_of_none():
    data = sample([4, 3])
    assert int(select_kl_cov(view(data), share=1e-6).sum()) == 1
    assert int(select_clip_cov(view(data), share=1e-6, covariance_low=-100.0).sum()) == 1
    assert not select_clip_cov(view(data), covariance_low=99.0, covariance_high=100.0).any()
    empty = sample([])
    assert not select_kl_cov(view(empty)).numel()
    assert not select_clip_cov(view(empty)).numel()


def test_clip_cov_leaves_out_a_random_share_of_the_candidates():
    data = sample([20, 20], seed=1)
    bounds = {"covariance_low": 0.0, "covariance_high": 3.0}
    everything = select_clip_cov(view(data), share=1.0, **bounds)
    cov = covariances(view(data))
    assert 3 < int(everything.sum()) < 40
    assert ((cov > 0.0) & (cov < 3.0))[everything].all()
    some = select_clip_cov(view(data, seed=1), share=0.075, **bounds)
    assert int(some.sum()) == 3
    assert everything[some].all()
    torch.testing.assert_close(some, select_clip_cov(view(data, seed=1), share=0.075, **bounds))
    others = [select_clip_cov(view(data, seed=seed), share=0.075, **bounds) for seed in range(2, 8)]
    assert any(not torch.equal(some, other) for other in others)


def test_clip_cov_is_ppo_without_the_selected_tokens():
    data = sample([5, 6], seed=3)
    component = Component("clip_cov", {"share": 0.3, "covariance_low": -0.5})
    select(component, data)
    assert data.tokens.selected is not None
    loss, _, metrics = token_loss(component, data)
    plain, _, _ = token_loss(Component("ppo", {"clip_low": 1.0, "clip_high": 1.0, "dual_clip": None}), data)
    assert data.tokens.selected.any()
    torch.testing.assert_close(loss, plain * ~data.tokens.selected)
    assert metrics.sums["actor/pg_clipfrac"] == data.tokens.selected.sum()


@pytest.mark.parametrize("function", [clip_cov, kl_cov])
def test_a_missing_selection_is_an_error(function):
    with pytest.raises(ValueError, match="selection"):
        function(*_parts(sample([2])))


def test_dro_stands_still_where_the_log_ratio_is_advantage_over_beta():
    data = sample([3], advantages=torch.tensor([0.3, -0.2, 0.0], dtype=torch.float64))
    at_rest = Sample(data.anchor + data.tokens.advantages / 0.5, data.anchor, data.tokens)
    loss, leaf, _ = token_loss(Component("dro", {"beta": 0.5}), at_rest)
    torch.testing.assert_close(gradient(loss.sum(), leaf), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    loss, leaf, _ = token_loss(Component("dro", {"beta": 0.5}), Sample(data.anchor, data.anchor, data.tokens))
    torch.testing.assert_close(gradient(loss.sum(), leaf), -data.tokens.advantages)


def test_gpg_is_reinforce_under_its_own_name():
    entries = [POLICY_LOSSES.get(name, "") for name in ("gpg", "reinforce")]
    assert all(entry.target is reinforce and not entry.traits.anchored for entry in entries)
    loss, leaf, _ = token_loss(Component("gpg"), data := sample([3, 2]))
    torch.testing.assert_close(gradient(loss.sum(), leaf), -data.tokens.advantages)


@pytest.mark.parametrize(
    ("name", "settings", "field"),
    [
        ("dppo_tv", {"clip_low": -0.1}, "loss.clip_low"),
        ("dppo_kl", {"ratio_cap": 0.5}, "loss.ratio_cap"),
        ("probability_band", {"penalty": -1.0}, "loss.penalty"),
        ("probability_band", {"band_high": -1.0}, "loss.band_high"),
        ("kl_cov", {"share": 2.0}, "loss.share"),
        ("clip_cov", {"covariance_low": 6.0}, "loss.covariance_high"),
        ("dro", {"beta": -1.0}, "loss.beta"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, settings, field):
    data = sample([2])
    data.tokens.selected = torch.zeros(2, dtype=torch.bool)
    with pytest.raises(SettingsError) as caught:
        token_loss(Component(name, settings), data)
    assert caught.value.field == field
