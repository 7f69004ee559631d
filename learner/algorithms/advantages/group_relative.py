"""Estimators that compare the responses of a prompt with one another; one advantage per sequence [S].

Members of a group with equal rewards have advantages of exactly 0. For the only member of a group, the setting
`single` decides its advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.advantages.normalization import (
    Single,
    centre,
    deviation,
    divide,
    normalize,
    share_of_largest,
    with_singles,
)
from rollmesh.learner.algorithms.advantages.returns import sequence_scores
from rollmesh.learner.algorithms.ragged import segment_max, segment_mean, segment_min, segment_sum
from rollmesh.learner.algorithms.registry import register_advantage
from rollmesh.learner.algorithms.types import Rollouts


@register_advantage("reward")
def reward(rollouts: Rollouts) -> Tensor:
    """A_i = r_i: REINFORCE without a baseline (Williams, 1992).

    For rewards that are centred already, such as a judge's preference in -1 .. 1.

    Returns:
        float [S].
    """
    return sequence_scores(rollouts)


@register_advantage("grpo", group_size=2, silent_where_equal=True)
def grpo(
    rollouts: Rollouts,
    *,
    normalize_by_std: bool = True,
    std: Literal["group", "batch"] = "group",
    epsilon: float = 1e-6,
    single: Single = "reward",
) -> Tensor:
    """Group relative advantages: A_i = (r_i - mean_g) / (std_g + epsilon) (DeepSeekMath, arXiv:2402.03300, sec. 4.1.2).

    Without the division this is Dr. GRPO (arXiv:2503.20783, sec. 3.1): the division gives prompts of small variance,
    those that are nearly always or nearly never solved, more weight than others.

    Args:
        rollouts: the whole batch.
        normalize_by_std: divide by the deviation.
        std: the deviation of the group's rewards (Bessel-corrected), or of all rewards of the batch (arXiv:2508.08221).
        epsilon: added to the deviation; 1e-6 in verl, 1e-4 in TRL.
        single: the advantage of a group of one: its reward, as with mean 0 and deviation 1 (verl), or 0.

    Returns:
        float [S]; 0 for a NaN reward (it does not apply), which enters no statistic.
    """
    return normalize(
        sequence_scores(rollouts),
        rollouts.group_ids,
        rollouts.num_groups,
        std=std if normalize_by_std else "none",
        epsilon=epsilon,
        single=single,
    )


@register_advantage("grpo_passk", group_size=2, silent_where_equal=True)
def grpo_passk(rollouts: Rollouts, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Only the best response of a group is reinforced, by its lead: A_best = (r_max - r_second) / (std_g + epsilon).

    All others have 0, and so has the best where it is not alone at the top, or alone in its group. From the
    leave-one-out estimate of the gradient of max@k at k = n (arXiv:2503.19595).

    Args:
        rollouts: the whole batch.
        normalize_by_std: divide by the group's deviation (Bessel-corrected).
        epsilon: added to the deviation.

    Returns:
        float [S].
    """
    scores, groups, count = sequence_scores(rollouts), rollouts.group_ids, rollouts.num_groups
    best = scores == segment_max(scores, groups, count)[groups]
    second = segment_max(torch.where(best, -torch.inf, scores), groups, count)[groups]
    alone_at_top = segment_sum(best.to(scores.dtype), groups, count)[groups] == 1
    lead = torch.where(best & alone_at_top & second.isfinite(), scores - second, 0.0)
    if not normalize_by_std:
        return lead
    centred = centre(scores, groups, count)
    return divide(lead, deviation(centred, torch.ones_like(best), groups, count) + epsilon)


@register_advantage("rloo", group_size=2, silent_where_equal=True)
def rloo(
    rollouts: Rollouts, *, normalize_by_std: bool = False, epsilon: float = 1e-4, single: Single = "reward"
) -> Tensor:
    """REINFORCE leave-one-out: A_i = r_i - mean of the others' rewards (arXiv:2402.14740).

    Equal to n / (n - 1) times the distance to the group's mean.

    Args:
        rollouts: the whole batch.
        normalize_by_std: divide by the deviation of the whole group (Bessel-corrected), plus epsilon.
        epsilon: see there.
        single: the advantage of a group of one: its reward (there is no baseline), or 0.

    Returns:
        float [S].
    """
    scores, groups, count = sequence_scores(rollouts), rollouts.group_ids, rollouts.num_groups
    centred = centre(scores, groups, count, leave_one_out=True)
    if normalize_by_std:
        own = centre(scores, groups, count)
        centred = divide(centred, deviation(own, ~scores.isnan(), groups, count) + epsilon)
    return with_singles(centred, scores, groups, count, single)


@register_advantage("opo", group_size=2, silent_where_equal=True)
def opo(rollouts: Rollouts, *, single: Single = "reward") -> Tensor:
    """On-policy RL with the optimal baseline: A_i = r_i - sum_g(l_j r_j) / sum_g(l_j), l = trained tokens.

    The length-weighted mean minimizes the variance of the gradient where the gradients of tokens are about orthogonal
    and of equal norm (arXiv:2505.23585).

    Args:
        rollouts: the whole batch.
        single: the advantage of a group of one: its reward (verl), or 0.

    Returns:
        float [S].
    """
    scores, groups, count = sequence_scores(rollouts), rollouts.group_ids, rollouts.num_groups
    lengths = rollouts.lengths.to(scores.dtype)
    above = scores - segment_min(scores, groups, count)[groups]
    baselines = divide(segment_sum(lengths * above, groups, count), segment_sum(lengths, groups, count))
    return with_singles(above - baselines[groups], scores, groups, count, single)


@register_advantage("gpg", group_size=2, silent_where_equal=True)
def gpg(rollouts: Rollouts, *, f_norm: float = 1.0, single: Single = "reward") -> Tensor:
    """Group policy gradient: A_i = alpha * (r_i - mean_g) / f_norm, alpha = S / number of rewards that are not 0.

    arXiv:2504.02546. alpha compensates for groups without a gradient, as counted by verl.

    Args:
        rollouts: the whole batch.
        f_norm: divides the advantages; 1 leaves them.
        single: the advantage of a group of one: alpha times its reward (verl), or 0.

    Returns:
        float [S].
    """
    scores, groups, count = sequence_scores(rollouts), rollouts.group_ids, rollouts.num_groups
    alpha = scores.numel() / torch.count_nonzero(scores).clamp_min(1).to(scores.dtype)
    centred = with_singles(centre(scores, groups, count), scores, groups, count, single)
    return alpha * centred / f_norm


@register_advantage("max_rl", group_size=2, silent_where_equal=True)
def max_rl(rollouts: Rollouts, *, epsilon: float = 1e-6) -> Tensor:
    """Maximum likelihood RL: A_i = (r_i - mean_g) / mean_g (arXiv:2602.02710).

    For rewards 0 and 1 the expected gradient is that of the log pass rate, truncated at n terms. So hard prompts weigh
    more than under the pass rate itself.

    Args:
        rollouts: the whole batch.
        epsilon: groups with a mean of this or less have advantages of 0.

    Returns:
        float [S].
    """
    scores, groups, count = sequence_scores(rollouts), rollouts.group_ids, rollouts.num_groups
    means = segment_mean(scores, groups, count)[groups]
    some = means > epsilon
    return torch.where(some, centre(scores, groups, count) / torch.where(some, means, 1.0), 0.0)


@register_advantage("grpo_length_penalty", group_size=2)
def grpo_length_penalty(rollouts: Rollouts, *, weight: float = 0.1) -> Tensor:
    """Group-centred rewards, each less a share of the group's mean that grows with its length.

    A_i = r'_i - mean_g(r'), r'_i = r_i - weight * mean_g(r) * l_i / max_g(l): being short pays only where the prompt
    is solved.

    Args:
        rollouts: the whole batch.
        weight: of the length, in shares of the group's mean reward.

    Returns:
        float [S].
    """
    groups, count = rollouts.group_ids, rollouts.num_groups
    scores = relative_penalties(sequence_scores(rollouts), groups, count, [rollouts.lengths], [weight])
    return centre(scores, groups, count)


def relative_penalties(
    scores: Tensor, group_ids: Tensor, count: int, costs: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """r_i - mean_g(r) * sum_k w_k * c_ki / max_g(c_k): rewards less what a response cost, relative to its group.

    Args:
        scores: float [S].
        group_ids: int64 [S].
        count: number of groups.
        costs: each [S], not negative: tokens generated, tokens read, turns ...
        weights: one per cost.

    Returns:
        float [S].
    """
    shares = [
        weight * share_of_largest(cost.to(scores.dtype), group_ids, count)
        for cost, weight in zip(costs, weights, strict=True)
    ]
    means = segment_mean(scores, group_ids, count)[group_ids]
    return scores - means * torch.stack(shares).sum(0) if shares else scores
