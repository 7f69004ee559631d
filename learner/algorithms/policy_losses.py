"""Policy losses: surrogate objectives per token, before importance weights and aggregation."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.metrics import Metrics, log_ratio_histogram
from learner.algorithms.registry import register_policy_loss
from learner.algorithms.settings import SettingsError
from learner.algorithms.types import TokenBatch

# exp(20) = 4.9e8 is finite in float32 with room for a sum over tokens.
MAX_LOG_RATIO = 20.0

# Losses whose value and gradient are 0 where the advantage is 0.
PROPORTIONAL_TO_ADVANTAGE = frozenset({"ppo"})


@register_policy_loss("ppo")
def ppo(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate with separate bounds and dual clip.

    With r = pi / pi_anchor: L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 and `dual_clip` = c is
    set, L = min(L, -A c). PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476, eq. 10; dual clip:
    arXiv:1912.09729, eq. 5. The log-ratio is kept within +-20 so that the ratio stays finite.

    Args:
        log_probs: float32 [R], with gradient.
        anchor_log_probs: float32 [R].
        tokens: advantages [R].
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        dual_clip: bound of the ratio for negative advantages; none: off.

    Returns:
        Loss per token [R], and metrics: shares of tokens whose gradient a clip took away, k3 estimate of
        KL(anchor || current) (Schulman, "Approximating KL divergence", 2020), quantiles of the ratio.

    Raises:
        SettingsError: bounds out of range.
    """
    _check_bounds(clip_low, clip_high, dual_clip)
    advantages = tokens.advantages
    log_ratio = (log_probs - anchor_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    with torch.no_grad():
        took_clip = clipped > plain
        sums = {
            "policy/clip_fraction": took_clip.sum(),
            "policy/clip_fraction_low": (took_clip & (advantages < 0)).sum(),
            "policy/clip_fraction_high": (took_clip & (advantages > 0)).sum(),
            "policy/k3_kl": (ratio - 1.0 - log_ratio).sum(),
        }
        histograms = {"policy/ratio": log_ratio_histogram(log_ratio)}
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        negative = advantages < 0
        sums["policy/dual_clip_fraction"] = ((loss > ceiling) & negative).sum()
        loss = torch.where(negative, torch.minimum(loss, ceiling), loss)
    return loss, Metrics(sums=sums, log_ratios=histograms)


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0.0 <= clip_low <= 1.0:
        raise SettingsError("loss.clip_low", f"expected a value in [0, 1], got {clip_low}")
    if clip_high < 0.0:
        raise SettingsError("loss.clip_high", f"expected a value >= 0, got {clip_high}")
    if dual_clip is not None and dual_clip <= 1.0:
        raise SettingsError("loss.dual_clip", f"expected a value > 1 or none, got {dual_clip}")
