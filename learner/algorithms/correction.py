"""Off-policy correction: what is done about tokens that another policy sampled.

Three policies are at play: behaviour (sampled the tokens), proximal (anchors the clip) and current. Modes:

`truncated_is` (default)
    The clip anchors at the proximal policy, and each token's loss is weighted with
    w = min(pi_proximal / pi_behaviour, cap), without gradient. Truncated importance sampling: Ionides 2008, eq. 3;
    with a proximal policy of its own it is decoupled PPO, arXiv:2110.00641, eq. 3. With one optimizer step per batch
    the proximal policy is the current one, which the training pass computes anyway; else one more forward pass
    before the first step computes it.
`behaviour`
    The clip anchors at the behaviour policy: off-policy PPO. Never an extra forward pass.
`none`
    The clip anchors at the proximal policy and nothing weighs the tokens: the gradient is biased as soon as the data
    is stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from learner.algorithms.metrics import Metrics, log_ratio_histogram, weight_moments
from learner.algorithms.policy_losses import MAX_LOG_RATIO
from learner.algorithms.settings import Settings, SettingsError
from learner.algorithms.types import TokenBatch, UpdatePlan


@dataclass(frozen=True)
class CorrectionSettings(Settings):
    """Settings of the correction.

    Attributes:
        mode: see the module.
        cap: bound of the importance weights (`truncated_is`).
        accept_uncorrected: allow mode `none` although data can be stale.
    """

    mode: Literal["truncated_is", "behaviour", "none"] = "truncated_is"
    cap: float = 2.0
    accept_uncorrected: bool = False

    def __post_init__(self) -> None:
        if self.cap < 1.0:
            raise SettingsError("cap", f"expected a bound >= 1, got {self.cap}")


def check_corrects(settings: CorrectionSettings, plan: UpdatePlan) -> None:
    """Refuses a run whose data can be stale and that corrects for nothing.

    Raises:
        SettingsError: naming the setting.
    """
    if settings.mode == "none" and plan.max_staleness > 0 and not settings.accept_uncorrected:
        raise SettingsError(
            "correction.mode",
            f"'none' corrects for nothing while buffer.max_staleness is {plan.max_staleness}",
            hint="use truncated_is or behaviour, set buffer.max_staleness: 0, or correction.accept_uncorrected: true",
        )


def needs_proximal(settings: CorrectionSettings, plan: UpdatePlan) -> bool:
    """Whether the proximal log-probs must be computed before the first optimizer step of a batch."""
    return settings.mode != "behaviour" and plan.updates > 1


def correct(
    log_probs: Tensor, tokens: TokenBatch, settings: CorrectionSettings
) -> tuple[Tensor, Tensor | None, Metrics]:
    """Anchor of the clip, and weights.

    Args:
        log_probs: float32 [R], current policy, detached.
        tokens: behaviour log-probs, and proximal ones where `needs_proximal`.
        settings: the mode.

    Returns:
        anchor log-probs [R]; weights [R] or None for 1; metrics of the current policy against the behaviour policy
        (effective sample size and quantiles of the untruncated ratio, k3 estimate of KL(behaviour || current), share
        of truncated weights, age).
    """
    proximal = log_probs if tokens.proximal_log_probs is None else tokens.proximal_log_probs
    drift = (log_probs - tokens.behaviour_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = drift.exp()
    sums = {"off_policy/k3_kl": (ratio - 1.0 - drift).sum(), "off_policy/staleness": tokens.staleness.sum()}
    maxima = {"off_policy/log_ratio_max": drift.abs().max(), "off_policy/staleness_max": tokens.staleness.max()}
    anchor, weights = proximal, None
    if settings.mode == "behaviour":
        anchor = tokens.behaviour_log_probs
    elif settings.mode == "truncated_is":
        weights = ratio
        if tokens.proximal_log_probs is not None:
            weights = (proximal - tokens.behaviour_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        sums["off_policy/truncated_fraction"] = (weights > settings.cap).sum()
        weights = weights.clamp(max=settings.cap)
    return (
        anchor,
        weights,
        Metrics(
            sums=sums,
            maxima={name: value.float() for name, value in maxima.items()},
            weights={"off_policy/weight": weight_moments(ratio)},
            log_ratios={"off_policy/ratio": log_ratio_histogram(drift)},
        ),
    )
