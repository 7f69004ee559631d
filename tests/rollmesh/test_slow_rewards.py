"""Warnings about a reward that is slow."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.launcher.console.slow_rewards_notice import SlowRewardsNotice, reward_wait_s, slow_rewards_text
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.mesh.config.load import load_config
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import buffer_pb2, membership_pb2

BUSY = "40 calls of reward functions wait, the longest for 9 s: no free worker, 4 are busy or start (reward.workers)"


def test_it_is_told_once_a_response_waits_for_long_and_again_when_it_doubles() -> None:
    slow, quick = SlowRewardsNotice(0), SlowRewardsNotice(0)
    assert [second for second in range(100) if slow.due(float(second), second)] == [10, 20, 40, 80]
    assert not any(quick.due(9.0, second) for second in range(1000)), "that long is how it is"


def test_after_quick_rewards_slow_ones_are_told_from_the_start() -> None:
    slow = SlowRewardsNotice(0)
    assert slow.due(80, 80)
    for now in range(81, 1000):
        assert not slow.due(now % 13, now), "it takes up to 12 s all the time: nothing new"
    for now in range(1000, 1350):
        assert not slow.due(3, now)
    assert slow.due(10, 1350)


def member(role: membership_pb2.Role, wait: Wait, *gauges: float) -> membership_pb2.Member:
    names = ("members_unscored", "reward_wait_seconds")
    return membership_pb2.Member(
        role=role,
        waiting_reason=wait.reason,
        wait_cause=wait.cause,
        gauges=dict(zip(names, gauges, strict=False)),
    )


def notice(generator: Wait, service: Wait, reward: dict[str, Any]) -> str:
    """The notice where the first generator and the reward service report these waits."""
    members = [
        member(membership_pb2.ROLE_GENERATOR, generator, 40, 12.4),
        member(membership_pb2.ROLE_GENERATOR, NO_WAIT, 24, 3),
        member(membership_pb2.ROLE_REWARD, service),
    ]
    snapshot = Snapshot(table=buffer_pb2.DescribeResponse(), members=members)
    assert reward_wait_s(snapshot) == 12.4
    return slow_rewards_text(
        snapshot, load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "reward": reward})
    )


@pytest.mark.parametrize(
    ("reward", "remedy"),
    [
        ({}, "--reward.workers=64"),
        ({"workers": 5}, "--reward.workers=10"),
        ({"endpoints": ["grpc://a:1"]}, "More services in reward.endpoints"),
    ],
)
def test_it_says_how_many_wait_why_and_which_key_changes_it(reward: dict[str, Any], remedy: str) -> None:
    said = notice(NO_WAIT, Wait(BUSY), reward)
    assert said.startswith(f"rewards are slow: 64 responses wait for theirs, the first of them for 12 s ({BUSY}); ")
    assert "nothing is lost; the run waits" in said
    assert remedy in said
    assert reward_wait_s(Snapshot(trouble="no answer")) == 0.0


JUDGE: dict[str, Any] = {"judge": {"base_url": "http://a:1/v1", "model": "m"}}
KEYS = ("reward.judge.requests_per_minute", "reward.isolation.concurrency", "--reward.workers")


@pytest.mark.parametrize(
    ("functions", "why", "remedies"),
    [
        (["judge", "math"], "judge: 60 requests a minute are allowed", ["reward.judge.requests_per_minute"]),
        (["judge", "math"], "no free worker, 4 are busy or start (reward.workers)", ["--reward.workers"]),
        (["judge", "code"], "code: programs wait for their turn", ["reward.isolation.concurrency"]),
        (["judge", "code"], "", [*KEYS]),
    ],
)
def test_the_scorer_that_says_why_has_the_remedy(functions: list[str], why: str, remedies: list[str]) -> None:
    said = notice(NO_WAIT, Wait(why), {"functions": functions, **JUDGE}).partition("the run waits. ")[2]
    assert [key for key in KEYS if key in said] == remedies


@pytest.mark.parametrize("before", ["waits for rewards: ", "silent for 9 s (was: waits for rewards: "])
def test_of_a_service_that_does_not_answer_it_says_that_responses_fail(before: str) -> None:
    dead = "no reward service answers: grpc://a:1: UNAVAILABLE: connection refused"
    wait = Wait(f"{before}{dead}", membership_pb2.WAIT_CAUSE_NO_REWARD_SERVICE)
    said = notice(wait, NO_WAIT, {"endpoints": ["grpc://a:1"]})
    assert dead in said
    assert said.endswith("a response fails after 30 s (rollout.reward_wait_s)")
    assert "lost" not in said
    assert "score more" not in said


@pytest.mark.parametrize("in_process", [False, True])
def test_of_a_function_that_does_not_return_it_says_that_rewards_are_lost(in_process: bool) -> None:
    hangs = "no free worker, 4 are busy or start (reward.workers); f of a.py did not return within 8 s"
    wait = Wait(f"waits for rewards: {hangs}" if in_process else hangs, membership_pb2.WAIT_CAUSE_REWARD_OVERDUE)
    said = notice(wait, NO_WAIT, {}) if in_process else notice(NO_WAIT, wait, {})
    assert f"12 s ({hangs}); if the function is slow and does not hang, more workers" in said
    assert "nothing is lost" not in said
