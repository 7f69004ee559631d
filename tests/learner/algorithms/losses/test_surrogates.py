"""Surrogates with clips and gates (ppo, gspo, gmpo, cispo, sapo, vespo) against one token or sequence at a time."""

from __future__ import annotations

import math

import pytest
import torch

from rollmesh.learner.algorithms.aggregation import aggregate
from rollmesh.learner.algorithms.losses import cispo, gmpo, gspo, ppo, sapo, vespo
from rollmesh.learner.algorithms.losses.soft import gamma_weights
from rollmesh.learner.algorithms.settings import Component, SettingsError
from tests.learner.algorithms.samples import Sample, gradient, sample, token_loss


def one_token(ratio: float, advantage: float) -> Sample:
    data = sample([1], advantages=torch.tensor([advantage], dtype=torch.float64))
    return Sample(data.anchor + math.log(ratio), data.anchor, data.tokens)


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss", "slope"),
    [
        (1.1, 2.0, {}, -2.2, -2.2),
        (1.5, 2.0, {}, -2.4, 0.0),
        (0.5, 2.0, {}, -1.0, -1.0),
        (0.5, -2.0, {}, 1.6, 0.0),
        (1.5, -2.0, {}, 3.0, 3.0),
        (5.0, -2.0, {}, 6.0, 0.0),
        (5.0, -2.0, {"dual_clip": None}, 10.0, 10.0),
        (1.5, 2.0, {"clip_high": 0.6}, -3.0, -3.0),
        (0.5, -2.0, {"clip_low": 0.6}, 1.0, 1.0),
        (5.0, -2.0, {"dual_clip": None, "two_sided_delta": 2.0}, 4.0, 0.0),
        (1.5, 2.0, {"clip_high": 4.0, "two_sided_delta": 1.2}, -2.4, 0.0),
    ],
)
def test_ppo_of_one_token(ratio, advantage, settings, loss, slope):
    found, leaf, _ = token_loss(Component("ppo", settings), one_token(ratio, advantage))
    assert found.item() == pytest.approx(loss)
    assert gradient(found.sum(), leaf).item() == pytest.approx(slope)


def test_both_gradients_of_gspo_agree_where_a_sequence_has_one_advantage():
    data = sample([4, 1, 3], seed=5, drift=0.1)
    found = []
    for way in ("token", "sequence"):
        loss, leaf, _ = token_loss(Component("gspo", {"clip_low": 0.5, "clip_high": 0.5, "gradient": way}), data)
        share = aggregate(loss, data.tokens, data.counts, "seq_mean_token_mean")
        found.append((share.detach(), gradient(share, leaf)))
    torch.testing.assert_close(found[0], found[1])


def test_gspo_clips_all_tokens_of_a_sequence_or_none():
    data = sample([3, 3], advantages=torch.ones(6, dtype=torch.float64))
    shift = torch.tensor([0.9, 0.0, 0.0, 0.3, -0.3, 0.0], dtype=torch.float64)
    loss, leaf, _ = token_loss(
        Component("gspo", {"clip_low": 0.2, "clip_high": 0.2}), Sample(data.anchor + shift, data.anchor, data.tokens)
    )
    torch.testing.assert_close(loss.detach(), -torch.tensor([1.2] * 3 + [1.0] * 3, dtype=torch.float64))
    slopes = gradient(loss.sum(), leaf)
    assert not slopes[:3].any()
    assert (slopes[3:] != 0).all()


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    advantages = torch.tensor([2.0] * 3 + [-1.0] * 2, dtype=torch.float64)
    shift = torch.tensor([0.9, 0.1, -0.7, 0.9, -0.7], dtype=torch.float64)
    data = sample([3, 2], advantages=advantages)
    loss, metrics = gmpo(data.anchor + shift, data.anchor, data.tokens, clip_low=0.4, clip_high=0.5)
    # A > 0 is clipped from above alone, A < 0 from below alone.
    first, second = -2.0 * math.exp((0.5 + 0.1 - 0.7) / 3), math.exp((0.9 - 0.4) / 2)
    torch.testing.assert_close(loss, torch.tensor([first] * 3 + [second] * 2, dtype=torch.float64))
    assert int(metrics.sums["actor/pg_clipfrac"]) == 2
    assert int(metrics.sums["actor/pg_clipfrac_lower"]) == 2


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    for ratio, weight in ((0.1, 0.5), (1.2, 1.2), (7.0, 2.0)):
        component = Component("cispo", {"clip_low": 0.5, "clip_high": 1.0})
        loss, leaf, _ = token_loss(component, one_token(ratio, -3.0))
        assert gradient(loss.sum(), leaf).item() == pytest.approx(3.0 * weight)


def test_sapo_has_the_plain_gradient_on_policy_and_fades_with_the_distance():
    slopes = []
    for ratio in (1.0, 1.5, 3.0, 10.0):
        loss, leaf, _ = token_loss(Component("sapo", {"tau_positive": 2.0}), one_token(ratio, 1.0))
        slopes.append(gradient(loss.sum(), leaf).item() / ratio)
    assert slopes[0] == pytest.approx(-1.0)
    assert slopes == sorted(slopes)
    assert abs(slopes[-1]) < 1e-5


def test_sapo_of_a_sequence_puts_means_in_the_place_of_tokens():
    data = sample([3], seed=2, by_token=True)
    loss, _ = sapo(data.log_probs, data.anchor, data.tokens, level="sequence")
    alone = sample([1], advantages=data.tokens.advantages.mean()[None])
    drift = (data.log_probs - data.anchor).mean()
    expected, _ = sapo(alone.anchor + drift, alone.anchor, alone.tokens)
    torch.testing.assert_close(loss, expected.expand(3))


def test_vespo_weighs_by_the_whole_ratio_of_the_sequence():
    advantages = torch.tensor([0.5, 0.5, -1.0, 0.0], dtype=torch.float64)
    data = sample([2, 1, 1], advantages=advantages, seed=4)
    found = []
    loss, leaf, metrics = token_loss(Component("vespo"), data)
    drift = data.log_probs - data.anchor
    for log_weight, k, rate in ((drift[:2].sum(), 2.0, 3.0), (drift[2], 3.0, 2.0), (drift[3], 2.0, 3.0)):
        found.append(log_weight.exp() ** k * torch.exp(rate * (1 - log_weight.exp())))
    phi = torch.stack([found[0], *found])
    torch.testing.assert_close(gradient(loss.sum(), leaf), -phi * advantages)
    torch.testing.assert_close(metrics.sums["vespo/phi"], phi.sum())


def test_vespos_weight_is_1_on_policy_and_fades_both_ways():
    logs = torch.tensor([0.0, -50.0, 50.0], dtype=torch.float64)
    phi = gamma_weights(logs, torch.full_like(logs, 2.0), torch.full_like(logs, 3.0))
    assert phi[0] == 1.0
    assert (phi[1:] < 1e-10).all()


@pytest.mark.parametrize(
    ("function", "settings", "field"),
    [
        (ppo, {"clip_low": 1.5}, "loss.clip_low"),
        (ppo, {"clip_high": -0.1}, "loss.clip_high"),
        (ppo, {"dual_clip": 1.0}, "loss.dual_clip"),
        (ppo, {"two_sided_delta": 0.5}, "loss.two_sided_delta"),
        (gspo, {"clip_low": -1.0}, "loss.clip_low"),
        (gmpo, {"clip_high": -1.0}, "loss.clip_high"),
        (cispo, {"clip_low": 2.0}, "loss.clip_low"),
        (sapo, {"tau_negative": 0.0}, "loss.tau_negative"),
        (vespo, {"k_positive": -1.0}, "loss.k_positive"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(function, settings, field):
    data = sample([2])
    with pytest.raises(SettingsError) as caught:
        function(data.log_probs, data.anchor, data.tokens, **settings)
    assert caught.value.field == field
