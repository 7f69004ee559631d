"""The correction in a run: once per batch on all of its tokens, then in the loss of every micro-batch.

`correct_batch` fills `Rollouts.importance_weights` and `Rollouts.keep`; the learner takes rejected tokens out of the
batch before it counts and splits it. So they leave numerator and denominator. Corrections that do not need the whole
batch are left to the loss, where the current policy's log-probs are computed anyway. Sequences are never split between
micro-batches, so ratios of sequences can be formed there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.correction.metrics import diagnostics, kept_metrics, rule_metrics, weight_metrics
from rollmesh.learner.algorithms.correction.ratios import drift, importance_weights, interpolated_proximal, level_drift
from rollmesh.learner.algorithms.correction.rejection import age_rejections, all_keep, rejections
from rollmesh.learner.algorithms.correction.settings import CorrectionSettings
from rollmesh.learner.algorithms.metrics import Metrics, log_ratio_histogram, weight_moments
from rollmesh.learner.algorithms.types import Rollouts, TokenBatch

PREFIX = "rollout_corr/"


def correct_batch(rollouts: Rollouts, settings: CorrectionSettings) -> dict[str, float]:
    """Sets weights and rejected tokens of a batch; for the batch stage.

    Where `rollouts.proximal_log_probs` are there, `importance_weights` is set (if the mode has weights) and all rules
    apply. Without them (`needs_proximal` is False) only `max_age` applies, and the loss computes the weights. `keep`
    stays None where nothing can be rejected; otherwise it is combined with masks that were set before.

    Args:
        rollouts: the batch; changed.
        settings: the correction.

    Returns:
        Metrics: `masked/<reason>`, the share of tokens that a rule rejects, and `rollout_corr/...` under verl's names
        (see `learner.algorithms.correction.metrics`).
    """
    ids, count = rollouts.sequence_ids, rollouts.num_sequences
    behaviour, proximal = rollouts.behaviour_log_probs, rollouts.proximal_log_probs
    metrics: dict[str, float] = {}
    if proximal is None:
        kept = age_rejections(rollouts.staleness, settings)
    else:
        kept = rejections(proximal, behaviour, rollouts.staleness, ids, count, settings)
        metrics |= diagnostics(proximal, behaviour, ids, count)
        metrics |= rule_metrics(proximal, behaviour, ids, count, settings)
        if settings.weighs:
            rollouts.importance_weights = importance_weights(proximal, behaviour, ids, count, settings)
            metrics |= weight_metrics(proximal, behaviour, ids, count, settings)
    metrics |= kept_metrics(kept, ids, count)
    masked = {f"masked/{reason}": metrics[f"rollout_rs_{reason}_masked_fraction"] for reason in kept if ids.numel()}
    keep = all_keep(kept)
    if keep is not None:
        rollouts.keep = keep if rollouts.keep is None else rollouts.keep & keep
    return masked | {PREFIX + name: value for name, value in metrics.items()}


def anchor_and_weights(
    log_probs: Tensor, tokens: TokenBatch, settings: CorrectionSettings
) -> tuple[Tensor, Tensor | None]:
    """Anchor log-probs of a micro-batch's ratios, and the weights of its tokens.

    Args:
        log_probs: [R], current policy.
        tokens: with the values that the batch stage has set.
        settings: the correction.

    Returns:
        Anchor log-probs [R]; weights [R], None where all are 1. Both without gradient.

    Raises:
        ValueError: normalized weights that the batch stage has not computed.
    """
    anchor = _anchor(log_probs.detach(), tokens, settings)
    if not settings.weighs:
        return anchor, None
    if tokens.importance_weights is not None:
        return anchor, tokens.importance_weights
    if settings.normalize:
        raise ValueError("normalized weights need the whole batch: call correct_batch in the batch stage")
    return anchor, importance_weights(
        anchor, tokens.behaviour_log_probs, tokens.sequence_ids, tokens.num_sequences, settings
    )


def drift_metrics(log_probs: Tensor, tokens: TokenBatch, settings: CorrectionSettings | None = None) -> Metrics:
    """Distance of the current policy from the one that sampled a micro-batch's tokens; always logged.

    - `rollout_corr/ratio/ess`, `/mean`, `/p01`, `/p50`, `/p99`: of the untruncated ratio current / behaviour;
    - `rollout_corr/kl`, `rollout_corr/k3_kl`: estimates of KL(behaviour || current), k1 and k3;
    - `rollout_corr/log_ratio_max`: the largest absolute log-ratio;
    - `staleness/mean`, `staleness/max`: age of the tokens, versions;
    - `rollout_corr/truncated_fraction`: tokens with a ratio outside [floor, cap]; with settings that weigh.

    Args:
        log_probs: [R], current policy.
        tokens: the micro-batch.
        settings: the correction.
    """
    behaviour = tokens.behaviour_log_probs
    d = drift(log_probs, behaviour)
    ratio = d.exp()
    sums = {
        "rollout_corr/kl": -d.sum(),
        "rollout_corr/k3_kl": (torch.expm1(d) - d).sum(),
        "staleness/mean": tokens.staleness.sum().to(d.dtype),
    }
    if settings is not None and settings.weighs:
        anchor = _anchor(log_probs.detach(), tokens, settings)
        weighed = level_drift(anchor, behaviour, tokens.sequence_ids, tokens.num_sequences, settings.level).exp()
        outside = (weighed > settings.cap) | (weighed < settings.floor)
        sums["rollout_corr/truncated_fraction"] = outside.sum().to(d.dtype)
    return Metrics(
        sums=sums,
        weights={"rollout_corr/ratio": weight_moments(ratio)},
        log_ratios={"rollout_corr/ratio": log_ratio_histogram(d)},
        maxima={
            "rollout_corr/log_ratio_max": _largest(d.abs()),
            "staleness/max": _largest(tokens.staleness.to(d.dtype)),
        },
    )


def _anchor(log_probs: Tensor, tokens: TokenBatch, settings: CorrectionSettings) -> Tensor:
    if settings.mode == "behaviour":
        return tokens.behaviour_log_probs
    if tokens.proximal_log_probs is not None:
        return tokens.proximal_log_probs
    if settings.proximal != "recompute":
        # The policy being optimized is on its way to the version after the one that staleness counts to.
        return interpolated_proximal(log_probs, tokens.behaviour_log_probs, tokens.staleness + 1, settings.proximal)
    return log_probs


def _largest(values: Tensor) -> Tensor:
    """Maximum of non-negative values; 0 for none."""
    return torch.cat((values, values.new_zeros(1))).max()
