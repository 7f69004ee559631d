"""Which groups are trained: the algorithm's group stage, and what no group may lack.

A group that is dropped has a reason, which is counted; another group takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollmesh.learner.algorithms.base import Algorithm
from rollmesh.learner.algorithms.types import Group, Needs
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.errors import RewardError

# The greedy response that the algorithm subtracts was not scored.
NO_BASELINE = "no_baseline"
# Fewer responses are scored than the algorithm compares (`Needs.group_size`).
TOO_FEW_MEMBERS = "too_few_members"


def algorithm_view(group: SampledGroup) -> Group:
    """The group as algorithms see it; lengths count response tokens, as the metadata states them."""
    metas = [member.meta for member in group.members]
    names = sorted({name for meta in metas for name in meta.components})
    return Group(
        rewards=torch.tensor([meta.reward for meta in metas], dtype=torch.float32),
        scored=torch.tensor([member.scored for member in group.members], dtype=torch.bool),
        lengths=torch.tensor([meta.response_tokens for meta in metas], dtype=torch.int64),
        truncated=torch.tensor([member.truncated for member in group.members], dtype=torch.bool),
        components={
            name: torch.tensor([meta.components.get(name, 0.0) for meta in metas], dtype=torch.float32)
            for name in names
        },
        baseline_reward=group.baseline_reward,
    )


def filter_groups(
    algorithm: Algorithm, groups: Sequence[SampledGroup]
) -> tuple[list[SampledGroup], dict[str, list[SampledGroup]]]:
    """Runs the group stage.

    Returns:
        The groups to train, in their order, and those dropped, by reason.

    Raises:
        RewardError: a response lacks a reward component that the algorithm needs by name.
    """
    needs = algorithm.needs
    kept: list[SampledGroup] = []
    dropped: dict[str, list[SampledGroup]] = {}
    for group in groups:
        reason = _rejection(needs, group) or algorithm.group_stage(algorithm_view(group))
        if reason is None:
            kept.append(group)
        else:
            dropped.setdefault(reason, []).append(group)
    return kept, dropped


def _rejection(needs: Needs, group: SampledGroup) -> str | None:
    if len(group.scored_members) < max(needs.group_size, 1):
        return TOO_FEW_MEMBERS
    if needs.greedy_baseline and group.baseline_reward is None:
        return NO_BASELINE
    for member in group.scored_members:
        missing = [name for name in needs.components if name not in member.meta.components]
        if missing:
            raise RewardError(
                f"the algorithm needs the reward components {', '.join(missing)}, but a response of group "
                f"{group.group_id} has {', '.join(sorted(member.meta.components)) or 'none'}",
                hint="name components as the reward functions report them, see reward.functions",
            )
    return None
