"""What is said of a reward that is slow."""

from __future__ import annotations

import pytest

from rollmesh.launcher.console.slow_rewards_notice import SlowRewards, reward_wait_s, slow_rewards
from rollmesh.launcher.mesh_monitor import Snapshot
from rollmesh.mesh.config.models import RewardSection
from rollmesh.protos import buffer_pb2, membership_pb2

BUSY = "40 calls of reward functions wait, the longest for 9 s: no free worker, 4 are busy or start (reward.workers)"


def test_it_is_told_once_a_response_waits_for_long_and_again_when_it_doubles() -> None:
    slow, quick = SlowRewards(0), SlowRewards(0)
    assert [second for second in range(100) if slow.due(float(second), second)] == [10, 20, 40, 80]
    assert not any(quick.due(9.0, second) for second in range(1000)), "that long is how it is"


def test_after_quick_rewards_slow_ones_are_told_from_the_start() -> None:
    slow = SlowRewards(0)
    assert slow.due(80, 80)
    for now in range(81, 1000):
        assert not slow.due(now % 13, now), "it takes up to 12 s all the time: nothing new"
    for now in range(1000, 1350):
        assert not slow.due(3, now)
    assert slow.due(10, 1350)


@pytest.mark.parametrize(
    ("reward", "remedy"),
    [
        (RewardSection(), "--reward.workers=64"),
        (RewardSection(workers=5), "--reward.workers=10"),
        (RewardSection(endpoints=["grpc://a:1"]), "More services in reward.endpoints"),
    ],
)
def test_it_says_how_many_wait_why_and_which_key_changes_it(reward: RewardSection, remedy: str) -> None:
    def member(role: membership_pb2.Role, reason: str, *figures: float) -> membership_pb2.Member:
        gauges = dict(zip(("members_unscored", "reward_wait_seconds"), figures, strict=False))
        return membership_pb2.Member(role=role, waiting_reason=reason, gauges=gauges)

    members = [
        member(membership_pb2.ROLE_GENERATOR, "", 40, 12.4),
        member(membership_pb2.ROLE_GENERATOR, "", 24, 3),
        member(membership_pb2.ROLE_REWARD, BUSY),
    ]
    snapshot = Snapshot(table=buffer_pb2.DescribeResponse(), members=members)
    assert reward_wait_s(snapshot) == 12.4
    said = slow_rewards(snapshot, reward)
    assert said.startswith(f"rewards are slow: 64 responses wait for theirs, the first of them for 12 s ({BUSY}); ")
    assert remedy in said
    assert reward_wait_s(Snapshot(trouble="no answer")) == 0.0
