"""What the algorithm makes of complete groups: advantages for the members, or a reason to drop the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from learner.algorithms.base import Algorithm
from learner.algorithms.types import Group, MemberAdvantages
from learner.groups import SampledGroup


@dataclass(frozen=True, slots=True, eq=False)
class WeighedGroup:
    """A group that will be trained.

    Attributes:
        group: as leased.
        advantages: float32, one tensor per member, 0-d or one value per trained token.
    """

    group: SampledGroup
    advantages: MemberAdvantages

    @property
    def group_id(self) -> str:
        return self.group.group_id


def algorithm_view(group: SampledGroup) -> Group:
    """The group as algorithms see it; lengths count response tokens, as the metadata states them."""
    members = group.members
    names = sorted({name for member in members for name in member.components})
    return Group(
        rewards=torch.tensor([member.reward for member in members], dtype=torch.float32),
        scored=torch.tensor(group.scored, dtype=torch.bool),
        lengths=torch.tensor([member.response_tokens for member in members], dtype=torch.int64),
        components={
            name: torch.tensor([member.components.get(name, 0.0) for member in members], dtype=torch.float32)
            for name in names
        },
    )


def weigh(
    algorithm: Algorithm, groups: Sequence[SampledGroup]
) -> tuple[list[WeighedGroup], dict[str, list[SampledGroup]]]:
    """Runs the group stage.

    Returns:
        The groups to train, in their order, and those dropped, by reason.
    """
    kept: list[WeighedGroup] = []
    dropped: dict[str, list[SampledGroup]] = {}
    for group in groups:
        outcome = algorithm.group_stage(algorithm_view(group))
        if isinstance(outcome, str):
            dropped.setdefault(outcome, []).append(group)
        else:
            kept.append(WeighedGroup(group, outcome))
    return kept, dropped
