"""Losses that weigh every token instead of cutting some off: CISPO, SAPO, VESPO.

Invariant: a sequence with advantages of 0 has loss 0 and gradient 0.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.losses.checks import check_clip, check_range
from rollmesh.learner.algorithms.losses.drift import drift_metrics
from rollmesh.learner.algorithms.losses.sequence_ratio import MAX_MEAN_LOG_RATIO, sequence_mean
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import MAX_LOG_RATIO, finite_log_probs, log_ratio
from rollmesh.learner.algorithms.ragged import segment_sum
from rollmesh.learner.algorithms.registry import register_policy_loss
from rollmesh.learner.algorithms.types import TokenBatch

# VESPO's weight of a sequence is bounded from below too, so that its logarithm stays finite.
MIN_LOG_SEQUENCE_WEIGHT = math.log(1e-8)


@register_policy_loss("cispo", silent_without_advantage=True, on_ratio=("clip_low", "clip_high"))
def cispo(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted by the clipped ratio, which is not differentiated: clipped tokens keep a gradient.

    With r = pi / pi_anchor: L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi. CISPO (MiniMax-M1),
    arXiv:2506.13585, eq. 4 and 5. TRL's `epsilon_high`, an absolute cap, is 1 + clip_high with clip_low = 1.

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R].
        clip_low: how far the weight may fall below 1; 1 (no lower bound) as in the paper.
        clip_high: how far the weight may rise above 1; a cap of 5 as in ScaleRL, arXiv:2510.13786.

    Returns:
        Loss per token [R], and metrics: tokens with a clipped weight (`actor/pg_clipfrac`), those clipped from above
        with A > 0 (`cispo_clip_ratio`, TRL's name). Drift from the anchor.

    Raises:
        SettingsError: a bound out of range.
    """
    check_clip(clip_low, clip_high)
    log_ratios = log_ratio(log_probs, anchor_log_probs)
    ratios = log_ratios.detach().exp()
    weights = ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weights * tokens.advantages * finite_log_probs(log_probs)
    clips = {
        "actor/pg_clipfrac": (weights != ratios).sum(),
        "cispo_clip_ratio": ((ratios > 1.0 + clip_high) & (tokens.advantages > 0)).sum(),
    }
    return loss, Metrics(sums=clips) | drift_metrics(log_ratios)


@register_policy_loss("sapo", silent_without_advantage=True, on_ratio=("tau_positive", "tau_negative"))
def sapo(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    level: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Metrics]:
    """A sigmoid gate in place of the clip: the gradient fades with the distance from ratio 1.

    With `r = pi / pi_anchor` and tau by the sign of A: `L = -A (4 / tau) sigmoid(tau (r - 1))`. The gradient at r = 1
    is that of the plain surrogate. SAPO, arXiv:2511.20347. `level: sequence` puts the geometric mean of the sequence's
    ratios in place of r and the mean of its advantages in place of A.

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R].
        tau_positive: temperature where A > 0.
        tau_negative: temperature elsewhere; larger, because lowering one token raises all others of the vocabulary.
            Both defaults are the paper's.
        level: see above.

    Returns:
        Loss per token [R], and drift from the anchor.

    Raises:
        SettingsError: a temperature that is not positive.
    """
    check_range("tau_positive", tau_positive, 0.0, open_low=True)
    check_range("tau_negative", tau_negative, 0.0, open_low=True)
    advantages = tokens.advantages
    log_ratios = log_ratio(log_probs, anchor_log_probs)
    exponent = log_ratios
    if level == "sequence":
        exponent = sequence_mean(log_ratios, tokens).clamp(max=MAX_MEAN_LOG_RATIO)
        advantages = sequence_mean(advantages, tokens)
    tau = _either(advantages > 0, tau_positive, tau_negative, advantages.dtype)
    gate = 4.0 / tau * torch.sigmoid(tau * (exponent.exp() - 1.0))
    return -advantages * gate, drift_metrics(log_ratios)


@register_policy_loss(
    "vespo",
    silent_without_advantage=True,
    on_ratio=("k_positive", "lambda_positive", "k_negative", "lambda_negative"),
)
def vespo(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted by a gamma-shaped function of the sequence's whole ratio, which is not differentiated.

    With W = prod_t pi / pi_anchor: L = -phi(W) A log pi, phi as in `gamma_weights`. VESPO, arXiv:2602.10693. The
    paper's W is taken to the behaviour policy: let that one anchor the ratio, and no further weights are needed.

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R], whole sequences.
        k_positive, lambda_positive: shape and rate where A >= 0.
        k_negative, lambda_negative: the same where A < 0: falls off faster above 1. TRL's defaults.

    Returns:
        Loss per token [R], and metrics: phi (`vespo/phi`, over tokens), drift from the anchor.

    Raises:
        SettingsError: a negative setting.
    """
    for name, value in (
        ("k_positive", k_positive),
        ("lambda_positive", lambda_positive),
        ("k_negative", k_negative),
        ("lambda_negative", lambda_negative),
    ):
        check_range(name, value, 0.0)
    log_ratios = log_ratio(log_probs, anchor_log_probs)
    log_weights = segment_sum(log_ratios.detach(), tokens.sequence_ids, tokens.num_sequences)[tokens.sequence_ids]
    positive = tokens.advantages >= 0
    shape = _either(positive, k_positive, k_negative, log_weights.dtype)
    rate = _either(positive, lambda_positive, lambda_negative, log_weights.dtype)
    phi = gamma_weights(log_weights, shape, rate)
    loss = -phi * tokens.advantages * finite_log_probs(log_probs)
    return loss, Metrics(sums={"vespo/phi": phi.sum()}) | drift_metrics(log_ratios)


def gamma_weights(log_weights: Tensor, shape: Tensor, rate: Tensor) -> Tensor:
    """phi(W) = W^k exp(lambda (1 - W)): 1 at W = 1, fading towards W = 0 and towards large W.

    Args:
        log_weights: log W; kept within [log 1e-8, 20].
        shape: k, of the same size.
        rate: lambda, of the same size.

    Returns:
        Of the same size, finite.
    """
    bounded = log_weights.clamp(MIN_LOG_SEQUENCE_WEIGHT, MAX_LOG_RATIO)
    # The largest phi, at W = k / lambda, is modest; the bound is for k far above lambda.
    return (rate + shape * bounded - rate * bounded.exp()).clamp(max=MAX_LOG_RATIO).exp()


def _either(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """`torch.where` of two numbers; that itself would round them to float32."""
    return torch.full_like(condition, no, dtype=dtype).masked_fill(condition, yes)
