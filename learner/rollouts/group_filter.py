"""The filter of groups: the algorithm's group stage, and requirements of every group.

A group that is dropped has a reason, which is counted; another group takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.types import Needs
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.errors import RewardError

# The greedy response that the algorithm subtracts was not scored.
NO_BASELINE = "no_baseline"
# Fewer responses are scored than the algorithm compares (`Needs.group_size`).
TOO_FEW_MEMBERS = "too_few_members"


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
        reason = _rejection(needs, group) or algorithm.group_stage(group.algorithm_view)
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
