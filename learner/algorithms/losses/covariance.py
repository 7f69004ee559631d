"""Losses that hold back the tokens which drive the entropy down: those with a large covariance of log-prob and A.

The whole minibatch decides about these tokens (a share of it, distances from its means). So a selection chooses
them before the optimizer step. The loss, purely per token, reads the choice as `TokenBatch.selected`.
Both are from "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617,
sec. 4.2, eq. 10 to 13.

Neither is silent without advantage: tokens with A = 0 enter the means, and may be selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.losses.checks import check_clip, check_range
from rollmesh.learner.algorithms.losses.drift import WIDE_LOG_RATIO, clip_region_metrics, drift_metrics
from rollmesh.learner.algorithms.losses.ppo import clipped_surrogate
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import MAX_LOG_RATIO, finite_log_probs, log_ratio
from rollmesh.learner.algorithms.registry import register_policy_loss
from rollmesh.learner.algorithms.types import StepView, TokenBatch


def selected_tokens(tokens: TokenBatch) -> Tensor:
    """The selected tokens, bool [R].

    Raises:
        ValueError: where no selection was made.
    """
    if tokens.selected is None:
        raise ValueError("this loss needs its selection: call it on the whole minibatch, and set TokenBatch.selected")
    return tokens.selected.bool()


def covariances(view: StepView) -> Tensor:
    """(A - mean A) (log pi - mean log pi) of every token of the minibatch, [R]."""
    log_probs = finite_log_probs(view.log_probs)
    if not log_probs.numel():
        return log_probs
    return (view.advantages - view.advantages.mean()) * (log_probs - log_probs.mean())


def select_clip_cov(
    view: StepView,
    *,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> Tensor:
    """Tokens that Clip-Cov detaches: a random subset of those with a covariance within bounds.

    Args:
        view: the whole minibatch.
        clip_low, clip_high, share, covariance_low, covariance_high: see `clip_cov`.

    Returns:
        bool [R]: max(1, int(share * R)) tokens, or all candidates where they are fewer.
    """
    ratios = log_ratio(view.log_probs, view.anchor_log_probs).exp()
    clipped = (ratios < 1.0 - clip_low) & (view.advantages < 0) | (ratios > 1.0 + clip_high) & (view.advantages > 0)
    cov = covariances(view)
    candidates = torch.nonzero(~clipped & (cov > covariance_low) & (cov < covariance_high)).squeeze(1)
    wanted = max(int(share * cov.numel()), 1)
    selected = torch.zeros_like(clipped)
    if candidates.numel() > wanted:
        order = torch.randperm(candidates.numel(), generator=view.generator)[:wanted]
        candidates = candidates[order.to(candidates.device)]
    selected[candidates] = True
    return selected


@register_policy_loss("clip_cov", on_ratio=("clip_low", "clip_high"), select=select_clip_cov)
def clip_cov(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate without the selected tokens of large covariance.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)). It is 0 for a random share of the tokens that are not
    clipped and have a covariance between the bounds. They stay in the denominator. arXiv:2505.22617, eq. 10, 11.

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R], `selected` by `select_clip_cov`.
        clip_low, clip_high: how far the ratio may fall below and rise above 1. The authors' 1 leaves to this clip only
            outliers, since the selection already holds the policy back.
        share: of the minibatch's tokens that are left out, at least one token; the paper's 2e-4.
        covariance_low, covariance_high: bounds, exclusive; the paper's (1, 5), in units of normalized advantages: far
            above the mean covariance, but not the outliers.

    Returns:
        Loss per token [R], and metrics: tokens left out (`actor/pg_clipfrac`, verl's meaning here), tokens clipped by
        side (`clip_ratio/*`), drift from the anchor.

    Raises:
        SettingsError: a setting out of range.
        ValueError: without a selection.
    """
    check_clip(clip_low, clip_high)
    check_range("share", share, 0.0, 1.0)
    check_range("covariance_high", covariance_high, covariance_low)
    selected = selected_tokens(tokens)
    log_ratios = log_ratio(log_probs, anchor_log_probs)
    ratios = log_ratios.exp()
    loss = torch.where(selected, 0.0, clipped_surrogate(ratios, tokens.advantages, clip_low, clip_high))
    metrics = clip_region_metrics(ratios, tokens.advantages, clip_low, clip_high) | drift_metrics(log_ratios)
    return loss, metrics | Metrics(sums={"actor/pg_clipfrac": selected.sum()})


def select_kl_cov(view: StepView, *, share: float = 2e-4) -> Tensor:
    """Tokens that KL-Cov penalizes: those with the largest covariance.

    Args:
        view: the whole minibatch.
        share: see `kl_cov`.

    Returns:
        bool [R]: max(1, int(share * R)) tokens; empty for an empty minibatch.
    """
    cov = covariances(view)
    selected = torch.zeros_like(cov, dtype=torch.bool)
    if cov.numel():
        selected[cov.topk(max(int(share * cov.numel()), 1)).indices] = True
    return selected


@register_policy_loss("kl_cov", on_ratio=("share", "coefficient"), select=select_kl_cov)
def kl_cov(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    share: float = 2e-4,
    coefficient: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """Plain surrogate, with a penalty on the drift of the tokens of largest covariance.

    L = -A r, plus coefficient |log r| for the selected tokens; nothing is clipped. arXiv:2505.22617, eq. 12, 13.

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R], `selected` by `select_kl_cov`.
        share: of the minibatch's tokens that are penalized, at least one token; 2e-4 as for the paper's 7B model.
        coefficient: of the penalty; the paper's 1.

    Returns:
        Loss per token [R], and metrics: tokens penalized (`actor/kl_cov_selected`), |log r| (`actor/ppo_kl_abs`, what
        verl reports as ppo_kl of this loss), drift from the anchor.

    Raises:
        SettingsError: a setting out of range.
        ValueError: without a selection.
    """
    check_range("share", share, 0.0, 1.0)
    check_range("coefficient", coefficient, 0.0)
    selected = selected_tokens(tokens)
    wide = log_ratio(log_probs, anchor_log_probs, WIDE_LOG_RATIO)
    log_ratios, drift = wide.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), wide.abs()
    loss = -tokens.advantages * log_ratios.exp() + torch.where(selected, coefficient * drift, 0.0)
    sums = {"actor/kl_cov_selected": selected.sum(), "actor/ppo_kl_abs": drift.detach().sum()}
    return loss, Metrics(sums=sums) | drift_metrics(log_ratios)
