"""Estimators of the KL divergence to a reference policy, as a penalty in the reward or a term of the loss.

With `x = log pi(a) - log pi_ref(a)` of the sampled token `a ~ pi` (J. Schulman, "Approximating KL divergence", 2020):

====== ============= =============== =====================================================================
name   aliases       value           as an estimate of KL(pi || pi_ref)
====== ============= =============== =====================================================================
k1     kl            x               unbiased, high variance; its gradient has the mean 0: for rewards
k2     mse           x^2 / 2         biased, low variance; its gradient is that of the KL
k3     low_var_kl    e^-x - 1 + x    unbiased, low variance, never negative
abs                  abs(x)          biased; the scale of x
====== ============= =============== =====================================================================

A `+` after a name (`k3+`) keeps the value and takes the gradient of k2: straight-through. The gradient of k2 under
samples of pi is the gradient of the KL divergence; those of k1 and k3 are not.

Everything is finite. Log-ratios are cut at `numerics.MIN_LOG_PROB` and its negative (-inf counts as it). The value of
k3 grows exponentially: its log-ratio is cut at +-20 and its value at 10. Where a cut is active the gradient is 0; that
of a `+` knows only the first cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.numerics import MAX_LOG_RATIO, MIN_LOG_PROB, finite_log_probs, log_ratio
from rollmesh.learner.algorithms.settings import Settings, SettingsError

Estimator = Literal["k1", "k2", "k3", "abs"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3", "abs")
_ALIASES: dict[str, Estimator] = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
# Largest value of k3: a token that the reference all but forbids must not outweigh a whole batch.
_MAX_K3 = 10.0
# The proportional error of the adaptive controller is cut here (Ziegler et al., sec. 2.2).
_MAX_ERROR = 0.2


@dataclass(frozen=True)
class KLSettings(Settings):
    """The penalty for leaving the reference policy.

    Attributes:
        where: `reward` subtracts it from the reward of every token (PPO, RLOO, REINFORCE++), `loss` adds it to the loss
            (GRPO). `none`: no reference policy is needed.
        estimator: k1, k2, k3 or abs, also with `+`. None: k1 in the reward, where only the value counts and k1 has no
            bias, and k3 in the loss (DeepSeekMath, arXiv:2402.03300, eq. 4).
        coefficient: weight of the penalty (at start, with `target`).
        target: KL per token to which the coefficient adapts; None: it stays.
        horizon: trajectories over which the adaptive coefficient reacts.
        unbiased: in the loss, weigh each token's estimate by the ratio of the policy to the one that sampled it, with
            its gradient. Then value and gradient of k1 and k3 are unbiased, however stale the token is (DeepSeek-V3.2,
            arXiv:2512.02556, sec. 3.1).
    """

    where: Literal["none", "reward", "loss"] = "none"
    estimator: str | None = None
    coefficient: float = 0.001
    target: float | None = None
    horizon: int = 10_000
    unbiased: bool = False

    def __post_init__(self) -> None:
        if self.estimator is not None:
            read_estimator(self.estimator)
        if self.coefficient < 0:
            raise SettingsError("coefficient", "must not be negative")
        if self.target is not None and self.target <= 0:
            raise SettingsError("target", "must be positive", hint="leave it out for a fixed coefficient")
        if self.horizon < 1:
            raise SettingsError("horizon", "must be at least 1 trajectory")
        if self.unbiased and self.where != "loss":
            raise SettingsError("unbiased", "weighs the KL in the loss", hint="set where: loss")

    @property
    def in_reward(self) -> str:
        """The estimator of the reward's penalty."""
        return self.estimator or "k1"

    @property
    def in_loss(self) -> str:
        """The estimator of the loss's term."""
        return self.estimator or "k3"


def read_estimator(name: str) -> tuple[Estimator, bool]:
    """The estimator that a name or alias stands for, and whether its gradient is straight-through (`+`).

    Raises:
        SettingsError: unknown name.
    """
    base = name.removesuffix("+")
    known = _ALIASES.get(base) or next((entry for entry in ESTIMATORS if entry == base), None)
    if known is None:
        names = ", ".join([*ESTIMATORS, *_ALIASES])
        raise SettingsError("estimator", f"unknown KL estimator {name!r}", hint=f"known: {names}, each also with +")
    return known, name.endswith("+")


def kl_estimate(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    estimator: str,
    *,
    bound: float | None = None,
    ratio_bound: float = MAX_LOG_RATIO,
) -> Tensor:
    """Estimate of KL(pi || pi_ref) per sampled token, as the module's table has it.

    Args:
        log_probs: float [R], current policy, with or without gradient.
        reference_log_probs: float [R].
        estimator: name or alias, also with `+`.
        bound: values are cut to +-bound; None: only k3's, at 10; inf: none.
        ratio_bound: k3 sees log-ratios within +-ratio_bound.

    Returns:
        float [R].

    Raises:
        SettingsError: unknown estimator.
    """
    kind, straight_through = read_estimator(estimator)
    difference = finite_log_probs(log_probs) - finite_log_probs(reference_log_probs)
    difference = difference.clamp(MIN_LOG_PROB, -MIN_LOG_PROB)
    half_square = 0.5 * difference.square()
    if kind == "k1":
        value = difference
    elif kind == "k2":
        value = half_square
    elif kind == "abs":
        value = difference.abs()
    else:
        cut = (-difference).clamp(-ratio_bound, ratio_bound)
        value = torch.expm1(cut) - cut
        bound = _MAX_K3 if bound is None else bound
    if bound is not None:
        value = value.clamp(-bound, bound)
    # The added difference is exactly 0 and carries the gradient.
    return value.detach() + (half_square - half_square.detach()) if straight_through else value


def sampling_ratio(log_probs: Tensor, behaviour_log_probs: Tensor) -> Tensor:
    """pi / pi_behaviour of the sampled tokens, [R], with the gradient of pi: `KLSettings.unbiased`.

    Under samples of the behaviour policy, the mean of this ratio times any f(pi) is the mean of f under pi itself. The
    same holds for its gradient. A behaviour log-prob that is not finite was not recorded: the token counts as sampled
    by pi.

    Args:
        log_probs: float [R], current policy.
        behaviour_log_probs: float [R].
    """
    known = torch.isfinite(behaviour_log_probs)
    sampled_by = torch.where(known, behaviour_log_probs, log_probs.detach())
    return log_ratio(log_probs, sampled_by).exp()


def kl_rewards(
    policy_log_probs: Tensor, reference_log_probs: Tensor, settings: KLSettings, coefficient: float
) -> Tensor:
    """The KL penalty as a reward of every token: -coefficient * KL_t (Ziegler et al., arXiv:1909.08593, eq. 2).

    Args:
        policy_log_probs: float [R], of the policy before this batch's updates.
        reference_log_probs: float [R].
        settings: name the estimator.
        coefficient: as it is now.

    Returns:
        float [R], without gradient.
    """
    with torch.no_grad():
        return -coefficient * kl_estimate(policy_log_probs, reference_log_probs, settings.in_reward)


def next_coefficient(coefficient: float, kl: float, steps: int, *, target: float, horizon: int) -> float:
    """The adaptive coefficient after a batch: a proportional controller in log space.

    e = clip(kl / target - 1, -0.2, 0.2); coefficient * (1 + e * steps / horizon)
    (Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, sec. 2.2).

    Args:
        coefficient: before the batch.
        kl: mean KL of the batch; one that is not finite leaves the coefficient as it is.
        steps: trajectories in the batch.
        target: KL to keep.
        horizon: trajectories over which to react.

    Returns:
        The coefficient, never negative.
    """
    if not math.isfinite(kl):
        return coefficient
    error = min(max(kl / target - 1.0, -_MAX_ERROR), _MAX_ERROR)
    return max(coefficient * (1.0 + error * steps / horizon), 0.0)
