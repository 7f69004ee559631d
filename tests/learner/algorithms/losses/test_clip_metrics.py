"""Metrics of clips and regions: the tokens that each loss counts, by side and by the sign of their advantage."""

from __future__ import annotations

import math

import pytest
import torch

from rollmesh.learner.algorithms.metrics import summarize
from rollmesh.learner.algorithms.settings import Component
from tests.learner.algorithms.samples import Sample, sample, token_loss

# Below 0.7, within, and above 1.5, with every sign; the last one once more, so that the signs differ in number.
_TOKENS = [(ratio, sign) for ratio in (0.6, 0.75, 1.0, 1.4, 1.6, 5.0) for sign in (1.0, 0.0, -1.0)] + [(5.0, -1.0)]
_BOUNDS = {"clip_low": 0.3, "clip_high": 0.5}
_REGION = {"actor/pg_clipfrac": 3, "clip_ratio/region_mean": 3, "clip_ratio/low_mean": 1, "clip_ratio/high_mean": 2}


def tokens() -> Sample:
    """Sequences of one token, each of probability 0.1 under the anchor."""
    ratios, advantages = torch.tensor(_TOKENS, dtype=torch.float64).T
    data = sample([1] * len(_TOKENS), advantages=advantages)
    anchor = torch.full_like(ratios, math.log(0.1))
    return Sample(anchor + ratios.log(), anchor, data.tokens)


@pytest.mark.parametrize(
    ("name", "settings", "counts"),
    [
        ("ppo", {**_BOUNDS, "dual_clip": 3.0}, {**_REGION, "actor/pg_clipfrac_lower": 2}),
        ("gspo", {**_BOUNDS, "dual_clip": 3.0}, {**_REGION, "actor/pg_clipfrac_lower": 2}),
        ("gspo", _BOUNDS, {**_REGION, "actor/pg_clipfrac_lower": 0}),
        (
            "gmpo",
            {"clip_low": -math.log(0.7), "clip_high": math.log(1.5)},
            {"actor/pg_clipfrac": 3, "actor/pg_clipfrac_lower": 4},
        ),
        ("cispo", _BOUNDS, {"actor/pg_clipfrac": 10, "cispo_clip_ratio": 2}),
        (
            "dppo_tv",
            {"clip_low": 0.03, "clip_high": 0.05, "ratio_cap": 1.5},
            {"actor/pg_clipfrac": 4, "actor/pg_clipfrac_lower": 5},
        ),
        (
            "probability_band",
            {"band_low": 0.03, "band_high": 0.05},
            {
                "actor/is_masked": 4,
                "actor/is_masked_low": 1,
                "actor/is_masked_high": 2,
                "actor/masked_advantage_positive": 2,
                "actor/masked_advantage_negative": 1,
            },
        ),
        (
            "probability_band",
            {"band_low": 0.03, "band_high": 0.05, "by_sign": False},
            {
                "actor/is_masked": 10,
                "actor/is_masked_low": 2,
                "actor/is_masked_high": 5,
                "actor/masked_advantage_positive": 3,
                "actor/masked_advantage_negative": 4,
            },
        ),
    ],
)
def test_tokens_that_a_loss_cuts_are_counted_by_side_and_sign(name, settings, counts):
    data = tokens()
    _, _, metrics = token_loss(Component(name, settings), data)
    assert {key: float(metrics.sums[key]) for key in counts} == counts
    log_ratios, summary = data.log_probs - data.anchor, summarize([metrics], len(_TOKENS))
    assert summary["actor/ppo_kl"] == pytest.approx(float(-log_ratios.mean()))
    assert summary["actor/k3_kl"] == pytest.approx(float((log_ratios.exp() - 1 - log_ratios).mean()))
    assert summary["actor/ratio/p50"] == pytest.approx(1.4, rel=0.02)


def test_the_band_divides_the_mismatch_into_that_of_dropped_and_of_kept_tokens():
    data = tokens()
    settings = {"band_low": 0.03, "band_high": 0.05, "by_sign": False}
    _, _, metrics = token_loss(Component("probability_band", settings), data)
    ratios = (data.log_probs - data.anchor).exp()
    mismatch, outside = ratios - 1 - ratios.log(), (ratios < 0.7) | (ratios > 1.5)
    assert float(metrics.sums["actor/masked_mismatch_kl"]) == pytest.approx(float(mismatch[outside].sum()))
    assert float(metrics.sums["actor/unmasked_mismatch_kl"]) == pytest.approx(float(mismatch[~outside].sum()))
