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
from rollmesh.protos import trajectory_pb2

# The greedy response that the algorithm subtracts was not scored.
NO_BASELINE = "no_baseline"
# Fewer responses are scored than the algorithm compares (`Needs.group_size`).
TOO_FEW_MEMBERS = "too_few_members"


def algorithm_view(group: SampledGroup) -> Group:
    """The group as algorithms see it; lengths count response tokens, as the metadata states them."""
    members = group.members
    names = sorted({name for member in members for name in member.components})
    return Group(
        rewards=torch.tensor([member.reward for member in members], dtype=torch.float32),
        scored=torch.tensor(group.scored, dtype=torch.bool),
        lengths=torch.tensor([member.response_tokens for member in members], dtype=torch.int64),
        truncated=torch.tensor([is_truncated(member) for member in members], dtype=torch.bool),
        components={
            name: torch.tensor([member.components.get(name, 0.0) for member in members], dtype=torch.float32)
            for name in names
        },
        baseline_reward=group.baseline_reward,
    )


def is_truncated(member: trajectory_pb2.MemberMeta) -> bool:
    """Whether the token budget ended the response."""
    return bool(member.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH)


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
        reason = _unfit(needs, group) or algorithm.group_stage(algorithm_view(group))
        if reason is None:
            kept.append(group)
        else:
            dropped.setdefault(reason, []).append(group)
    return kept, dropped


def _unfit(needs: Needs, group: SampledGroup) -> str | None:
    if sum(group.scored) < max(needs.group_size, 1):
        return TOO_FEW_MEMBERS
    if needs.greedy_baseline and group.baseline_reward is None:
        return NO_BASELINE
    for member, scored in zip(group.members, group.scored, strict=True):
        missing = [name for name in needs.components if scored and name not in member.components]
        if missing:
            raise RewardError(
                f"the algorithm needs the reward components {', '.join(missing)}, but a response of group "
                f"{group.group_id} has {', '.join(sorted(member.components)) or 'none'}",
                hint="name components as the reward functions report them, see reward.functions",
            )
    return None
