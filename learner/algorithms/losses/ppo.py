"""The clipped surrogate: PPO, with separate bounds (DAPO), dual clip and a two-sided cap.

Invariant: a token with advantage 0 has loss 0 and gradient 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.losses.checks import check_clip, check_range
from rollmesh.learner.algorithms.losses.drift import clip_region_metrics, drift_metrics
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.registry import register_policy_loss
from rollmesh.learner.algorithms.types import TokenBatch


def clipped_surrogate(ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), [R]: PPO, arXiv:1707.06347, eq. 7.

    Args:
        ratios: [R], with gradient.
        advantages: [R].
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
    """
    return torch.maximum(-advantages * ratios, -advantages * ratios.clamp(1.0 - clip_low, 1.0 + clip_high))


def dual_clipped(loss: Tensor, advantages: Tensor, dual_clip: float | None) -> tuple[Tensor, Metrics]:
    """Bounds the loss of negative advantages: min(L, -A c) where A < 0 (arXiv:1912.09729, eq. 5).

    Args:
        loss: [R], of a clipped surrogate.
        advantages: [R].
        dual_clip: c > 1; none: off.

    Returns:
        Loss [R], and `actor/pg_clipfrac_lower`: tokens that the bound took the gradient of.
    """
    if dual_clip is None:
        return loss, Metrics(sums={"actor/pg_clipfrac_lower": torch.zeros_like(advantages).sum()})
    ceiling = -advantages * dual_clip
    negative = advantages < 0
    bounded = ((loss.detach() > ceiling) & negative).sum()
    loss = torch.where(negative, torch.minimum(loss, ceiling), loss)
    return loss, Metrics(sums={"actor/pg_clipfrac_lower": bounded})


@register_policy_loss(
    "ppo", silent_without_advantage=True, on_ratio=("clip_low", "clip_high", "dual_clip", "two_sided_delta")
)
def ppo(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    two_sided_delta: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate with separate bounds, dual clip and a cap on the ratio.

    With `r = pi / pi_anchor`: `L = max(-A min(r, delta), -A clip(r, 1 - clip_low, 1 + clip_high))`. Where A < 0 and
    `dual_clip = c` is set, `L = min(L, -A c)`. PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476,
    eq. 10; dual clip: arXiv:1912.09729, eq. 5; delta: INTELLECT-2, arXiv:2505.07291. The log-ratio is kept within +-20
    so that the ratio stays finite. Anchored by the proximal policy and weighted by `proximal / behaviour` it is the
    objective of decoupled PPO (arXiv:2110.00641, eq. 10).

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R].
        clip_low: how far the ratio may fall below 1; 0.2 is PPO's.
        clip_high: how far the ratio may rise above 1; 0.2 is PPO's, DAPO takes 0.28.
        dual_clip: bound of the ratio for negative advantages, where the clip leaves it free; 3 as in the paper and
            verl; none: off.
        two_sided_delta: bound of the ratio in the unclipped term for either sign (TRL's `delta`); none: off. For
            negative advantages it does what `dual_clip` does, so one of the two is enough.

    Returns:
        Loss per token [R], and metrics: tokens clipped (`actor/pg_clipfrac`, by side `clip_ratio/*`), tokens bounded
        by the dual clip (`actor/pg_clipfrac_lower`), drift from the anchor.

    Raises:
        SettingsError: a bound out of range.
    """
    check_clip(clip_low, clip_high, dual_clip)
    advantages = tokens.advantages
    log_ratios = log_ratio(log_probs, anchor_log_probs)
    ratios = log_ratios.exp()
    if two_sided_delta is None:
        loss = clipped_surrogate(ratios, advantages, clip_low, clip_high)
    else:
        check_range("two_sided_delta", two_sided_delta, 1.0, open_low=True)
        capped = -advantages * ratios.clamp(max=two_sided_delta)
        loss = torch.maximum(capped, -advantages * ratios.clamp(1.0 - clip_low, 1.0 + clip_high))
    loss, lower = dual_clipped(loss, advantages, dual_clip)
    regions = clip_region_metrics(ratios, advantages, clip_low, clip_high)
    return loss, regions | lower | drift_metrics(log_ratios)
