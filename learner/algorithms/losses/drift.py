"""Drift of the current policy from the one that anchors the ratio: metrics that every loss reports."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.metrics import Metrics, log_ratio_histogram
from rollmesh.learner.algorithms.numerics import MAX_LOG_RATIO, MIN_LOG_PROB

# Log-ratios that enter a mean or a square, not exp(), may be as wide as finite log-probs are.
WIDE_LOG_RATIO = -MIN_LOG_PROB


@torch.no_grad()
def drift_metrics(log_ratios: Tensor) -> Metrics:
    """Estimates of KL(anchor || current) from the anchor's tokens, and quantiles of the ratio.

    With d = log(pi / pi_anchor): `actor/ppo_kl` is -d (k1: unbiased, noisy, may be negative), `actor/k3_kl` is
    exp(d) - 1 - d (never negative). Schulman, "Approximating KL divergence", 2020.

    Args:
        log_ratios: [R], finite.
    """
    bounded = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return Metrics(
        sums={"actor/ppo_kl": -log_ratios.sum(), "actor/k3_kl": (bounded.expm1() - bounded).sum()},
        log_ratios={"actor/ratio": log_ratio_histogram(log_ratios)},
    )


@torch.no_grad()
def clip_region_metrics(ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Metrics:
    """Tokens outside the trust region in the direction that their advantage pushes: their gradient is taken away.

    `clip_ratio/low_mean` counts ratios below `1 - clip_low` with A < 0, `clip_ratio/high_mean` those above
    `1 + clip_high` with A > 0. The metrics `clip_ratio/region_mean` and `actor/pg_clipfrac` (one metric by TRL's and by
    verl's name) count both.

    Args:
        ratios: [R].
        advantages: [R].
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
    """
    low = ((ratios < 1.0 - clip_low) & (advantages < 0)).sum()
    high = ((ratios > 1.0 + clip_high) & (advantages > 0)).sum()
    return Metrics(
        sums={
            "actor/pg_clipfrac": low + high,
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
        }
    )
