"""Ratios of whole sequences: the geometric mean of the tokens' ratios takes their place (GSPO, GMPO).

Invariants: a sequence's tokens share one ratio, so a micro-batch must hold sequences as a whole. A sequence of
advantage 0 has loss 0 and gradient 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.losses.checks import check_clip, check_range
from rollmesh.learner.algorithms.losses.drift import WIDE_LOG_RATIO, clip_region_metrics, drift_metrics
from rollmesh.learner.algorithms.losses.ppo import clipped_surrogate, dual_clipped
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.ragged import segment_mean
from rollmesh.learner.algorithms.registry import register_policy_loss
from rollmesh.learner.algorithms.types import TokenBatch

# Policies with a mean of e^10 over a sequence have nothing in common; verl's bound.
MAX_MEAN_LOG_RATIO = 10.0


def sequence_mean(values: Tensor, tokens: TokenBatch) -> Tensor:
    """Mean of a sequence's values at each of its tokens, [R], with gradient."""
    return segment_mean(values, tokens.sequence_ids, tokens.num_sequences)[tokens.sequence_ids]


@register_policy_loss("gspo", silent_without_advantage=True, on_ratio=("clip_low", "clip_high", "dual_clip"))
def gspo(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    gradient: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate of the sequence's length-normalized ratio.

    With s_i = exp(mean_t log(pi / pi_anchor)): L_it = max(-A_it s, -A_it clip(s, 1 - clip_low, 1 + clip_high)), and
    for A < 0 with `dual_clip` = c, L = min(L, -A c). GSPO, arXiv:2507.18071, eq. 5 to 7. `gradient: token` is its
    eq. 14 (GSPO-token): the value of s_it is s_i and its gradient that of the token's own log-prob; `sequence`
    differentiates the mean. Both agree where a sequence's tokens share one advantage and `seq_mean_token_mean`
    aggregates, which is the paper's aggregation.

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R], whole sequences.
        clip_low, clip_high: how far the ratio may fall below and rise above 1; the paper's values (sec. 5.1), two
            orders smaller than PPO's because the mean over a sequence moves so much less.
        dual_clip: bound of the ratio for negative advantages; none (off) as in the paper.
        gradient: see above.

    Returns:
        Loss per token [R], and metrics as of `ppo`.

    Raises:
        SettingsError: a bound out of range.
    """
    check_clip(clip_low, clip_high, dual_clip)
    advantages = tokens.advantages
    log_ratios = log_ratio(log_probs, anchor_log_probs, WIDE_LOG_RATIO)
    means = sequence_mean(log_ratios, tokens)
    if gradient == "token":
        # Through log_ratios, not log_probs: their difference to their own value is 0 where those are infinite.
        means = means.detach() + (log_ratios - log_ratios.detach())
    ratios = means.clamp(max=MAX_MEAN_LOG_RATIO).exp()
    loss, lower = dual_clipped(clipped_surrogate(ratios, advantages, clip_low, clip_high), advantages, dual_clip)
    return loss, clip_region_metrics(ratios, advantages, clip_low, clip_high) | lower | drift_metrics(log_ratios)


@register_policy_loss("gmpo", silent_without_advantage=True, on_ratio=("clip_low", "clip_high"))
def gmpo(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, Metrics]:
    """Geometric mean of token ratios that are clipped one by one, in logarithms.

    With d = log(pi / pi_anchor) and g = sgn(A): d' = g min(g d, g clip(d, -clip_low, clip_high));
    L_it = -mean_t(A) exp(mean_t d'). GMPO, arXiv:2507.20673 (verl's `geo_mean`). Aggregate it with
    `seq_mean_token_mean`: every token carries its sequence's loss. A token's importance weight multiplies that as
    well; weights at the geometric level keep the product a geometric mean.

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R], whole sequences.
        clip_low, clip_high: bounds of the log-ratio; (e^-0.4, e^0.4) as in the paper: wide, as one token has a small
            say in the mean.

    Returns:
        Loss per token [R], and metrics: tokens with a log-ratio out of bounds and A > 0 (`actor/pg_clipfrac`) or A < 0
        (`actor/pg_clipfrac_lower`), as verl counts them. Drift from the anchor.

    Raises:
        SettingsError: a bound out of range.
    """
    check_range("clip_low", clip_low, 0.0)
    check_range("clip_high", clip_high, 0.0)
    advantages = tokens.advantages
    signs = advantages.sign()
    log_ratios = log_ratio(log_probs, anchor_log_probs, WIDE_LOG_RATIO)
    bounded = log_ratios.clamp(-clip_low, clip_high)
    pessimistic = signs * torch.minimum(signs * log_ratios, signs * bounded)
    ratios = sequence_mean(pessimistic, tokens).clamp(max=MAX_MEAN_LOG_RATIO).exp()
    loss = -sequence_mean(advantages, tokens) * ratios
    outside = (log_ratios != bounded).detach()
    clips = {
        "actor/pg_clipfrac": (outside & (advantages > 0)).sum(),
        "actor/pg_clipfrac_lower": (outside & (advantages < 0)).sum(),
    }
    return loss, Metrics(sums=clips) | drift_metrics(log_ratios)
