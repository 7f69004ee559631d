"""The optimal token baseline: at every position, the baseline under which the gradient varies least."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.advantages.normalization import divide, is_alone
from rollmesh.learner.algorithms.advantages.returns import rewards_per_token
from rollmesh.learner.algorithms.ragged import (
    discounted_returns,
    expand,
    positions,
    running_sums,
    segment_max,
    segment_sum,
)
from rollmesh.learner.algorithms.registry import register_advantage
from rollmesh.learner.algorithms.types import Estimate, Rollouts


@register_advantage("tir_optimal_token_baseline", needs=("sum_pi_squared", "proximal_log_probs"), group_size=2)
@register_advantage("optimal_token_baseline", needs=("sum_pi_squared", "proximal_log_probs"), group_size=2)
def optimal_token_baseline(
    rollouts: Rollouts, *, handle_zero_tail: bool = True, use_importance_weights: bool = True, epsilon: float = 1e-8
) -> Estimate:
    """A_it = G_it - B_gt, B_gt = sum_i(W_it G_it) / sum_i(W_it) over the group's responses at position t.

    G is the reward to go. W_it, the sum of w_is over s <= t, stands for the squared norm of the gradient of the
    response so far. `w = 1 - 2 pi + sum_v pi_v^2` is that of one token's log-prob with respect to the logits
    (arXiv:2602.07078, the logit-gradient proxy). Positions count trained tokens, so that tool output does not shift
    responses against one another: both names mean this form.

    Args:
        rollouts: the whole batch.
        handle_zero_tail: where one response alone is so long, the baseline would be its own return; 0 takes its place.
        use_importance_weights: multiply w by the squared importance weights, where the batch has them.
        epsilon: added to the sum of weights.

    Returns:
        advantages [R]. Where a group has one response with tokens, its baseline is 0.
    """
    assert rollouts.sum_pi_squared is not None
    assert rollouts.proximal_log_probs is not None
    norms = squared_gradient_norms(rollouts.proximal_log_probs, rollouts.sum_pi_squared)
    if use_importance_weights and rollouts.importance_weights is not None:
        norms = norms * rollouts.importance_weights.square()
    returns = discounted_returns(rewards_per_token(rollouts).to(norms.dtype), 1.0, rollouts.lengths)
    baselines = token_baselines(
        returns,
        running_sums(norms, rollouts.lengths),
        rollouts,
        alone=is_alone(members_with_tokens(rollouts), rollouts.num_groups + 1),
        handle_zero_tail=handle_zero_tail,
        epsilon=epsilon,
    )
    return Estimate(returns - baselines)


def members_with_tokens(rollouts: Rollouts) -> Tensor:
    """Groups of the sequences, int64 [S], with a group of their own, G, for those without a trained token."""
    return torch.where(rollouts.lengths > 0, rollouts.group_ids, rollouts.num_groups)


def squared_gradient_norms(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """1 - 2 pi + sum_v pi_v^2, [R]: squared norm of the gradient of log pi(token) with respect to the logits."""
    return 1.0 - 2.0 * log_probs.exp() + sum_pi_squared


def token_baselines(
    returns: Tensor,
    weights: Tensor,
    rollouts: Rollouts,
    *,
    alone: Tensor,
    handle_zero_tail: bool,
    epsilon: float,
    places: Tensor | None = None,
) -> Tensor:
    """Weighted means of the returns over the group at each position, [R].

    Args:
        returns: float [R].
        weights: float [R].
        rollouts: lengths and groups.
        alone: bool [S], sequences that there is nothing to compare with: their baseline is 0.
        handle_zero_tail: 0 in the longest response of a group, where it is longer than all others.
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
    without = expand(alone, lengths, total)
    if handle_zero_tail:
        without |= at >= expand(_tail_start(lengths, rollouts.group_ids, rollouts.num_groups), lengths, total)
    return torch.where(without, 0.0, baselines)


def _tail_start(lengths: Tensor, group_ids: Tensor, count: int) -> Tensor:
    """First position at which a sequence is the only one left of its group, int64 [S]; out of reach without one."""
    sizes = lengths.to(torch.float64)
    longest = sizes == segment_max(sizes, group_ids, count)[group_ids]
    others = segment_max(torch.where(longest, 0.0, sizes), group_ids, count)[group_ids].to(torch.int64)
    sole = longest & is_alone(torch.where(longest, group_ids, count), count + 1)
    return torch.where(sole, others, torch.iinfo(torch.int64).max)
