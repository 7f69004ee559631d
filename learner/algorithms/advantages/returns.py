"""Returns of rewards: rewards per token, reward to go, lambda-returns, generalized advantages.

The recurrences take discounts per step as tensors, so that a trajectory may end, or be cut, anywhere. A discount of 0
after step t means that no step follows (terminated). A continuation of 0 means that the next step belongs to another
trajectory (done: bootstrapped with the value, then cut).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.ragged import last_tokens, reverse_scan, sequence_sum, shift_left
from rollmesh.learner.algorithms.types import Rollouts


def sequence_scores(rollouts: Rollouts) -> Tensor:
    """Reward of a whole response with everything that its tokens got, [S]: for estimators per sequence."""
    if rollouts.token_rewards is None:
        return rollouts.rewards
    return rollouts.rewards + sequence_sum(rollouts.token_rewards, rollouts.lengths).to(rollouts.rewards.dtype)


def rewards_per_token(rollouts: Rollouts) -> Tensor:
    """Rewards of every token, the response's own at its last one, [R]."""
    if rollouts.token_rewards is None:
        rewards = rollouts.rewards.new_zeros(rollouts.num_tokens)
    else:
        rewards = rollouts.token_rewards.clone()
    places, sequences = last_tokens(rollouts.lengths)
    rewards[places] += rollouts.rewards[sequences].to(rewards.dtype)
    return rewards


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    lengths: Tensor,
    *,
    discounts: Tensor | float,
    lam: Tensor | float,
    continuations: Tensor | float = 1.0,
) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16), before any whitening.

    A_t = delta_t + discount_t * continuation_t * lam_t * A_{t+1}, delta_t = r_t + discount_t * V'_t - V_t.

    Args:
        rewards: float [R].
        values: float [R], V before each token.
        next_values: float [R], V after each token (`following_values`).
        lengths: int64 [S].
        discounts: [R] or a number; 0 where a trajectory terminates.
        lam: [R] or a number in [0, 1].
        continuations: [R] or a number; 0 where a trajectory is cut.

    Returns:
        float [R].
    """
    errors = rewards + discounts * next_values - values
    return reverse_scan(errors, discounts * continuations * lam, lengths)


def following_values(values: Tensor, lengths: Tensor, bootstrap: Tensor | float = 0.0) -> Tensor:
    """The value after each token [R]: the next token's; after the last one `bootstrap`, a number or [S]."""
    return shift_left(values, lengths, bootstrap)


def lambda_returns(
    rewards: Tensor,
    next_values: Tensor,
    lengths: Tensor,
    *,
    discounts: Tensor | float,
    lam: float,
    continuations: Tensor | None = None,
) -> Tensor:
    """TD(lambda) returns (Sutton and Barto, 2018, sec. 12.8).

    G_t = r_t + discount_t * ((1 - lam) * V'_t + lam * G_{t+1}), with V'_t in place of G_{t+1} at a sequence's last
    step and where a trajectory is cut. A part for critics that learn from such returns: no preset uses it.

    Args:
        rewards: float [R].
        next_values: float [R], V after each step.
        lengths: int64 [S].
        discounts: [R] or a number; 0 where a trajectory terminates.
        lam: in [0, 1].
        continuations: float [R], 0 where a trajectory is cut.

    Returns:
        float [R].
    """
    going_on = torch.ones_like(rewards) if continuations is None else continuations.clone()
    going_on[last_tokens(lengths)[0]] = 0.0
    inputs = rewards + discounts * (1.0 - lam * going_on) * next_values
    return reverse_scan(inputs, discounts * lam * going_on, lengths)
