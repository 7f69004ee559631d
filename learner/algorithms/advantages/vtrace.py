"""V-trace: off-policy targets for the critic and advantages for the actor (IMPALA, arXiv:1802.01561).

With rho_t = pi / mu of the token taken, clipped at rho_bar and c_bar:

    v_t - V_t = clip(rho_t) (r_t + gamma V_{t+1} - V_t) + gamma lam clip(c_t) (v_{t+1} - V_{t+1})      (eq. 1, remark 2)
    A_t       = clip(rho_t) (r_t + gamma v_{t+1} - V_t)                                                (sec. 4.2)

rho_bar says which policy the critic's fixed point belongs to, c_bar how fast it is reached. The leaky variant mixes
clipped and plain ratios (arXiv:2002.12928): alpha clip(rho) + (1 - alpha) rho.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.advantages.returns import following_values, rewards_per_token
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.ragged import last_tokens, reverse_scan, shift_left
from rollmesh.learner.algorithms.registry import register_advantage
from rollmesh.learner.algorithms.types import Estimate, Rollouts


@register_advantage("vtrace", needs=("values", "proximal_log_probs"))
def vtrace(
    rollouts: Rollouts,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    alpha: float = 1.0,
) -> Estimate:
    """V-trace over trained tokens, from the behaviour policy to the policy before this batch's updates.

    arXiv:1802.01561, eq. 1; the module has the formulas.

    The clipped ratio is part of the advantages: combine it with a loss or a correction that weighs by it once more
    only on purpose.

    Args:
        rollouts: the whole batch; pi is the proximal policy.
        gamma: discount per token.
        lam: multiplies c.
        rho_bar: clip of the errors' weights, and of the advantages'.
        c_bar: clip of the traces' weights.
        alpha: share of the clipped ratio; 1: plain V-trace. Less than 1 lets products of ratios grow without bound;
            what leaves the dtype's range is cut to it.

    Returns:
        advantages [R], and returns v_t [R].
    """
    assert rollouts.values is not None
    assert rollouts.proximal_log_probs is not None
    values, lengths = rollouts.values, rollouts.lengths
    ratios = log_ratio(rollouts.proximal_log_probs, rollouts.behaviour_log_probs).exp().to(values.dtype)
    rewards = rewards_per_token(rollouts).to(values.dtype)
    following = following_values(values, lengths)
    errors = vtrace_errors(
        rewards,
        values,
        following,
        ratios,
        lengths,
        discounts=gamma,
        lam=lam,
        rho_bar=rho_bar,
        c_bar=c_bar,
        alpha=alpha,
    )
    targets = values + errors
    estimates = bootstrapped(rewards, targets, following, lengths, discounts=gamma)
    largest = torch.finfo(values.dtype).max
    advantages = leaky_clip(ratios, rho_bar, alpha) * (estimates - values)
    return Estimate(advantages.clamp(-largest, largest), targets)


def vtrace_errors(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    ratios: Tensor,
    lengths: Tensor,
    *,
    discounts: Tensor | float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    alpha: float = 1.0,
    continuations: Tensor | float = 1.0,
    trace_discounts: Tensor | float | None = None,
) -> Tensor:
    """v_t - V_t, [R].

    Args:
        rewards, values, next_values: float [R].
        ratios: float [R], pi / mu.
        lengths: int64 [S].
        discounts: [R] or a number; 0 where a trajectory terminates.
        lam: multiplies c.
        rho_bar, c_bar: clips of the ratios.
        alpha: share of the clipped ratio.
        continuations: [R] or a number; 0 where a trajectory is cut.
        trace_discounts: discount of the next step's error, where it differs from that of the next value.
    """
    rho, traces = leaky_clip(ratios, rho_bar, alpha), lam * leaky_clip(ratios, c_bar, alpha)
    errors = rho * (rewards + discounts * next_values - values)
    error_discounts = discounts if trace_discounts is None else trace_discounts
    return reverse_scan(errors, error_discounts * continuations * traces, lengths)


def bootstrapped(
    rewards: Tensor,
    targets: Tensor,
    next_values: Tensor,
    lengths: Tensor,
    *,
    discounts: Tensor | float,
    lam: float = 1.0,
    continuations: Tensor | None = None,
) -> Tensor:
    """Estimate of Q of the token taken, [R]: r_t + discount_t * (lam v_{t+1} + (1 - lam) V_{t+1}).

    Args:
        rewards: float [R].
        targets: float [R], v_t.
        next_values: float [R], V after each step; takes the place of v_{t+1} at a sequence's last step and where a
            trajectory is cut.
        lengths: int64 [S].
        discounts: [R] or a number.
        lam: share of the target.
        continuations: float [R], 0 where a trajectory is cut.
    """
    going_on = torch.ones_like(rewards) if continuations is None else continuations.clone()
    going_on[last_tokens(lengths)[0]] = 0.0
    share = lam * going_on
    return rewards + discounts * (share * shift_left(targets, lengths) + (1.0 - share) * next_values)


def leaky_clip(ratios: Tensor, bound: float, alpha: float = 1.0) -> Tensor:
    """alpha * min(ratio, bound) + (1 - alpha) * ratio, [R]."""
    return alpha * ratios.clamp_max(bound) + (1.0 - alpha) * ratios
