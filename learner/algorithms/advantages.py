"""Advantage estimators: from the rewards of a complete group to the advantages of its members.

Members that could not be scored enter no statistic and get the advantage 0.
"""

from __future__ import annotations

import torch

from learner.algorithms.registry import register_advantage
from learner.algorithms.types import Group, MemberAdvantages


@register_advantage("grpo")
def grpo(group: Group, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> MemberAdvantages:
    """Group-relative advantage: A_i = (r_i - mean(r)) / (std(r) + epsilon), over the scored members.

    GRPO, arXiv:2402.03300, sec. 4.1.2; without the division by the (unbiased) standard deviation it is the
    estimator of Dr. GRPO, arXiv:2503.20783, sec. 3.2. A single scored member has no group to compare with: its
    mean counts as 0 and its deviation as 1.

    Args:
        group: n members.
        normalize_by_std: divide by the standard deviation.
        epsilon: added to the standard deviation.

    Returns:
        n 0-d tensors in the dtype of the rewards.
    """
    rewards, scored = group.rewards, group.scored
    known = rewards[scored]
    if known.numel() > 1:
        centred = rewards - known.mean()
        if normalize_by_std:
            centred = centred / (known.std() + epsilon)
    else:
        centred = rewards
    return torch.where(scored, centred, 0.0).unbind()


@register_advantage("reward")
def reward(group: Group) -> MemberAdvantages:
    """The reward itself, A_i = r_i, without a baseline: for rewards that are centred already.

    REINFORCE, Williams 1992, eq. 11 with b = 0.

    Returns:
        n 0-d tensors.
    """
    return torch.where(group.scored, group.rewards, 0.0).unbind()
