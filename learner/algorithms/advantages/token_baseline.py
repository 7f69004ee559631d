"""The optimal token baseline: at every position, the baseline under which the gradient varies least."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.advantages.normalization import divide, is_alone
from learner.algorithms.advantages.returns import rewards_per_token
from learner.algorithms.ragged import (
    discounted_returns,
    expand,
    positions,
    running_sums,
    segment_count,
    segment_max,
    segment_sum,
)
from learner.algorithms.registry import register_advantage
from learner.algorithms.types import Estimate, Rollouts


@register_advantage("tir_optimal_token_baseline", needs=("sum_pi_squared", "proximal_log_probs"), group_size=2)
@register_advantage("optimal_token_baseline", needs=("sum_pi_squared", "proximal_log_probs"), group_size=2)
def optimal_token_baseline(
    rollouts: Rollouts, *, handle_zero_tail: bool = True, use_importance_weights: bool = True, epsilon: float = 1e-8
) -> Estimate:
    """A_it = G_it - B_gt, B_gt = sum_i(W_it G_it) / sum_i(W_it) over the group's responses at position t.

    G is the reward to go. W_it, the sum of w_is over s <= t, stands for the squared norm of the gradient of the
    response so far; w = 1 - 2 pi + sum_v pi_v^2 is that of one token's log-prob with respect to the logits
    (arXiv:2602.07078, eq. 9 and 12). Positions count trained tokens, so that tool output does not shift responses
    against one another: both names mean this form.

    Args:
        rollouts: the whole batch.
        handle_zero_tail: where one response alone is so long, the baseline would be its own return; 0 takes its place.
        use_importance_weights: multiply w by the squared importance weights, where the batch has them.
        epsilon: added to the sum of weights.

    Returns:
        advantages [R]. In a group of one the baseline is 0.
    """
    assert rollouts.sum_pi_squared is not None
    assert rollouts.proximal_log_probs is not None
    norms = squared_gradient_norms(rollouts.proximal_log_probs, rollouts.sum_pi_squared)
    if use_importance_weights and rollouts.importance_weights is not None:
        norms = norms * rollouts.importance_weights.square()
    returns = discounted_returns(rewards_per_token(rollouts).to(norms.dtype), 1.0, rollouts.lengths)
    baselines = token_baselines(
        returns, running_sums(norms, rollouts.lengths), rollouts, handle_zero_tail=handle_zero_tail, epsilon=epsilon
    )
    return Estimate(returns - baselines)


def squared_gradient_norms(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """1 - 2 pi + sum_v pi_v^2, [R]: squared norm of the gradient of log pi(token) with respect to the logits."""
    return 1.0 - 2.0 * log_probs.exp() + sum_pi_squared


def token_baselines(
    returns: Tensor,
    weights: Tensor,
    rollouts: Rollouts,
    *,
    handle_zero_tail: bool,
    epsilon: float,
    places: Tensor | None = None,
) -> Tensor:
    """Weighted means of the returns over the group at each position, [R].

    Args:
        returns: float [R].
        weights: float [R].
        rollouts: lengths and groups.
        handle_zero_tail: 0 behind the second longest response of a group.
        epsilon: added to the sum of weights.
        places: int64 [R], position of each token; None: tokens are counted.
    """
    if not returns.numel():
        return torch.zeros_like(returns)
    lengths, total = rollouts.lengths, returns.numel()
    groups = expand(rollouts.group_ids, lengths, total)
    at = positions(lengths) if places is None else places
    width = int(at.max()) + 1
    segments = groups * width + at
    cells = rollouts.num_groups * width
    tops = segment_sum(weights * returns, segments, cells)
    baselines = divide(tops, segment_sum(weights, segments, cells) + epsilon)[segments]
    alone = expand(is_alone(rollouts.group_ids, rollouts.num_groups), lengths, total)
    if handle_zero_tail:
        alone = alone | (at >= _second_longest(lengths, rollouts.group_ids, rollouts.num_groups)[groups])
    return torch.where(alone, 0.0, baselines)


def _second_longest(lengths: Tensor, group_ids: Tensor, count: int) -> Tensor:
    """Length of the second longest sequence per group, int64 [G]; that of the longest where two are as long."""
    sizes = lengths.to(torch.float64)
    longest = segment_max(sizes, group_ids, count)
    at_top = sizes == longest[group_ids]
    others = segment_max(torch.where(at_top, -1.0, sizes), group_ids, count)
    tied = segment_count(group_ids[at_top], count) > 1
    return torch.where(tied, longest, others).clamp_min(0).to(torch.int64)
