"""The groups that are trained: reasons, greedy baselines, and components that are missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollmesh.learner.algorithms.types import Group, Needs
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.learner.rollouts.group_filter import filter_groups
from rollmesh.mesh.errors import RewardError
from rollmesh.protos import trajectory_pb2
from tests.learner.dataflow import Plain, make_group, member

RNG = np.random.default_rng(0)


class Picky(Plain):
    """Drops what has no reward above 0."""

    def __init__(self, **needs: Any) -> None:
        super().__init__()
        self.needs_ = Needs(**needs)
        self.seen: list[Group] = []

    @property
    def needs(self) -> Needs:
        return self.needs_

    def group_stage(self, group: Group) -> str | None:
        self.seen.append(group)
        return None if (group.rewards[group.scored] > 0).any() else "all_wrong"


def greedy_group(number: int, rewards: list[float | None]) -> SampledGroup:
    """The last reward is the greedy member's; None: not scored."""
    members = [member(i, 2 + i, r or 0.0, scored=r is not None) for i, r in enumerate(rewards)]
    return make_group(number, members, RNG, greedy=1)


def test_greedy_members_give_the_baseline_and_nothing_else() -> None:
    group = greedy_group(0, [1.0, None, 3.0, 7.0])
    assert [m.meta.member for m in group.members] == [0, 1, 2]
    assert [m.scored for m in group.members] == [True, False, True]
    assert [m.trajectory is not None for m in group.members] == [True, False, True]
    view = group.algorithm_view
    assert view.baseline_reward == 7.0
    assert view.rewards.tolist() == [1.0, 0.0, 3.0]
    assert view.scored.tolist() == [True, False, True]
    assert view.lengths.tolist() == [2, 3, 4]


def test_groups_are_kept_or_dropped_by_reason() -> None:
    groups = [
        greedy_group(0, [1.0, 0.0, 1.0]),
        greedy_group(1, [1.0, 0.0, None]),
        greedy_group(2, [1.0, None, 1.0]),
        greedy_group(3, [0.0, 0.0, 1.0]),
        greedy_group(4, [None, None, 1.0]),
    ]
    algorithm = Picky(greedy_baseline=True, group_size=2)
    kept, dropped = filter_groups(algorithm, groups)
    assert [g.group_id for g in kept] == ["g0"]
    assert {reason: [g.group_id for g in found] for reason, found in dropped.items()} == {
        "no_baseline": ["g1"],
        "too_few_members": ["g2", "g4"],
        "all_wrong": ["g3"],
    }
    # The group stage sees only groups that lack nothing.
    assert len(algorithm.seen) == 2
    kept, dropped = filter_groups(Picky(), groups)
    assert [g.group_id for g in kept] == ["g0", "g1", "g2"]
    assert sorted(dropped) == ["all_wrong", "too_few_members"]


def test_algorithms_see_truncation_and_components() -> None:
    long = trajectory_pb2.FINISH_REASON_LENGTH
    members = [
        member(0, 1, 1.0, components={"style": 0.5}, finish_reason=long),
        member(1, 1, 1.0, components={"form": 0.25}),
    ]
    view = make_group(0, members, RNG).algorithm_view
    assert view.truncated.tolist() == [True, False]
    assert {name: values.tolist() for name, values in view.components.items()} == {
        "style": [0.5, 0.0],
        "form": [0.0, 0.25],
    }
    assert view.baseline_reward is None


def test_a_missing_component_is_an_error_not_a_zero() -> None:
    group = make_group(0, [member(0, 1, 1.0, components={"style": 1.0})], RNG)
    assert filter_groups(Picky(components=("style",)), [group])[0] == [group]
    with pytest.raises(RewardError, match=r"components form, but a response of group g0 has style"):
        filter_groups(Picky(components=("style", "form")), [group])
