"""Rewards of length: added to a response's reward, or in its place.

Every function is pure and takes one entry per response [S].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollmesh.learner.algorithms.ragged import segment_max, segment_min


def soft_overlong(lengths: Tensor, *, max_response_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """Penalty that grows linearly over the last tokens of the budget.

    With the budget L and the buffer c: 0 up to `L - c`, `factor * ((L - c) - |y|) / c` up to L, `-factor` beyond (DAPO,
    arXiv:2503.14476, eq. 13).

    Args:
        lengths: int64 [S], response tokens.
        max_response_tokens: L.
        buffer_tokens: c; 0: no penalty.
        factor: the largest penalty; the paper's is 1.

    Returns:
        float64 [S], between -factor and 0.
    """
    if buffer_tokens <= 0:
        return torch.zeros(lengths.shape, dtype=torch.float64, device=lengths.device)
    excess = (lengths - (max_response_tokens - buffer_tokens)).double() / buffer_tokens
    return -factor * excess.clamp(0.0, 1.0)


def shortest_correct(rewards: Tensor, lengths: Tensor, group_ids: Tensor, *, correct_above: float = 0.5) -> Tensor:
    """Length reward within a group: short correct responses gain, long ones lose, wrong ones never gain.

    `lambda = 0.5 - (|y| - min) / (max - min)` over the lengths of the group. A correct response gets lambda, a wrong
    one `min(0, lambda)`; 0 where all are equally long (Kimi k1.5, arXiv:2501.12599, sec. 2.3.3).

    Args:
        rewards: float [S].
        lengths: int64 [S].
        group_ids: int64 [S], 0 .. G-1.
        correct_above: a reward over this is correct.

    Returns:
        float [S], between -0.5 and 0.5.
    """
    if not rewards.numel():
        return rewards.clone()
    groups = int(group_ids.max()) + 1
    sizes = lengths.to(rewards.dtype)
    shortest = segment_min(sizes, group_ids, groups)[group_ids]
    spread = segment_max(sizes, group_ids, groups)[group_ids] - shortest
    share = 0.5 - (sizes - shortest) / spread.clamp_min(1.0)
    share = torch.where(rewards > correct_above, share, share.clamp(max=0.0))
    return torch.where(spread > 0, share, 0.0)


def cosine(
    rewards: Tensor,
    lengths: Tensor,
    *,
    max_response_tokens: int,
    correct: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    correct_above: float = 0.5,
) -> Tensor:
    """Reward by correctness and length: correct ones should be short, wrong ones may think longer.

    From the first number at length 0 to the second at the whole budget L, along half a cosine:
    `last + (first - last) * (1 + cos(pi * |y| / L)) / 2` (Yeo et al., arXiv:2502.03373, sec. 4.2).

    Args:
        rewards: float [S], which only say what is correct.
        lengths: int64 [S].
        max_response_tokens: L.
        correct, wrong: rewards at length 0 and at length L.
        correct_above: a reward over this is correct.

    Returns:
        float [S], in place of the rewards.
    """
    progress = (lengths.to(rewards.dtype) / max_response_tokens).clamp(0.0, 1.0)
    weight = 0.5 * (1.0 + torch.cos(math.pi * progress))
    good = rewards > correct_above
    first = torch.where(good, correct[0], wrong[0]).to(rewards.dtype)
    last = torch.where(good, correct[1], wrong[1]).to(rewards.dtype)
    return last + (first - last) * weight
