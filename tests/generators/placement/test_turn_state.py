"""The way of a generator from any state to any goal, without I/O."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.placement.turn_state import (
    Action,
    Fence,
    Goal,
    Memory,
    SleepGoal,
    TurnState,
    WakeGoal,
    gives_groups_back,
    includes,
    joined,
)
from rollmesh.mesh.errors import FencedError, UnreachableError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos.generator_pb2 import (
    SLEEP_LEVEL_FROZEN,
    SLEEP_LEVEL_UNSPECIFIED,
    SLEEP_LEVEL_WITHOUT_KV_CACHE,
    SLEEP_LEVEL_WITHOUT_WEIGHTS,
    WAKE_STEP_GENERATING,
    WAKE_STEP_MEMORY,
    WAKE_STEP_VERIFIED,
    WAKE_STEP_WEIGHTS,
)

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
_GOALS = st.one_of(
    st.builds(SleepGoal, st.integers(SLEEP_LEVEL_FROZEN, SLEEP_LEVEL_WITHOUT_WEIGHTS)),
    st.builds(WakeGoal, st.integers(WAKE_STEP_MEMORY, WAKE_STEP_GENERATING), st.sampled_from([None, V1, V2])),
)


class Walk:
    """A generator that takes every action at once, or fails at some."""

    def __init__(self, *, shares_devices: bool) -> None:
        self.state = TurnState.at_start(shares_devices=shares_devices)
        self.serving: PolicyVersion | None = None if shares_devices else V1

    def go(self, goal: Goal, fail_at: int = 99) -> list[Action]:
        """The actions on the way; the last one fails where there are `fail_at`."""
        taken: list[Action] = []
        while (action := self.state.next_action(goal, self.serving)) is not None:
            taken.append(action)
            assert len(taken) < 10, taken
            self.state.begin(action)
            if len(taken) == fail_at:
                return taken
            if action is Action.RELEASE_WEIGHTS:
                self.serving = None
            elif action is Action.LOAD:
                assert isinstance(goal, WakeGoal)
                self.serving = goal.policy or V1
            elif action is Action.VERIFY:
                self.state.verified = self.serving
            self.state.finish(action)
        return taken


def test_a_turn_of_the_learner_step_by_step() -> None:
    walk = Walk(shares_devices=False)
    assert walk.go(SleepGoal(SLEEP_LEVEL_FROZEN)) == [Action.FREEZE]
    assert walk.state.level == SLEEP_LEVEL_FROZEN
    assert walk.go(SleepGoal(SLEEP_LEVEL_WITHOUT_KV_CACHE)) == [Action.RELEASE_KV_CACHE]
    assert walk.state.level == SLEEP_LEVEL_WITHOUT_KV_CACHE
    assert walk.go(SleepGoal(SLEEP_LEVEL_WITHOUT_WEIGHTS)) == [Action.RELEASE_WEIGHTS]
    assert walk.state.level == SLEEP_LEVEL_WITHOUT_WEIGHTS
    assert walk.go(WakeGoal(WAKE_STEP_MEMORY, V2)) == [Action.TAKE_MEMORY]
    assert walk.go(WakeGoal(WAKE_STEP_WEIGHTS, V2)) == [Action.LOAD]
    assert walk.go(WakeGoal(WAKE_STEP_VERIFIED, V2)) == [Action.VERIFY]
    assert walk.state.level == SLEEP_LEVEL_WITHOUT_KV_CACHE
    assert walk.go(WakeGoal(WAKE_STEP_GENERATING, V2)) == [Action.TAKE_KV_CACHE, Action.RESUME]
    assert walk.state.level == SLEEP_LEVEL_UNSPECIFIED


def test_one_call_takes_all_steps_and_a_second_none() -> None:
    walk = Walk(shares_devices=True)
    assert walk.go(SleepGoal(SLEEP_LEVEL_WITHOUT_WEIGHTS)) == [], "it starts asleep"
    assert walk.go(WakeGoal(WAKE_STEP_GENERATING, V1)) == [
        Action.TAKE_MEMORY,
        Action.LOAD,
        Action.VERIFY,
        Action.TAKE_KV_CACHE,
        Action.RESUME,
    ]
    assert walk.go(WakeGoal(WAKE_STEP_GENERATING, V1)) == []
    assert walk.go(SleepGoal(SLEEP_LEVEL_WITHOUT_WEIGHTS)) == [Action.FREEZE, Action.RELEASE_WEIGHTS]
    assert walk.go(SleepGoal(SLEEP_LEVEL_FROZEN)) == [], "deeper includes it"


def test_a_turn_that_is_taken_back_before_memory_was_given_back_fetches_nothing() -> None:
    walk = Walk(shares_devices=False)
    walk.state.verified = V1
    walk.go(SleepGoal(SLEEP_LEVEL_FROZEN))
    assert walk.go(WakeGoal(WAKE_STEP_GENERATING, V1)) == [Action.RESUME]


def test_awake_it_waits_for_a_newer_version_without_a_pause() -> None:
    walk = Walk(shares_devices=False)
    assert walk.go(WakeGoal(WAKE_STEP_GENERATING, V2)) == [Action.LOAD]
    assert walk.state.generating


@given(shares=st.booleans(), way=st.lists(st.tuples(_GOALS, st.integers(1, 6)), max_size=8), goal=_GOALS, after=_GOALS)
def test_every_goal_is_reached_whatever_failed_before(
    shares: bool, way: list[tuple[Goal, int]], goal: Goal, after: Goal
) -> None:
    walk = Walk(shares_devices=shares)
    for other, fail_at in way:
        walk.go(other, fail_at)
    walk.go(goal)
    assert walk.go(goal) == []
    state = walk.state
    if isinstance(goal, SleepGoal):
        assert state.frozen
        assert not state.generating
        assert state.level >= goal.level
    else:
        assert state.memory >= Memory.WEIGHTS
        if goal.step >= WAKE_STEP_WEIGHTS:
            assert walk.serving is not None
            assert goal.policy is None or walk.serving >= goal.policy
        if goal.step == WAKE_STEP_GENERATING:
            assert state.generating
            assert not state.frozen
    walk.go(after)
    assert walk.go(after) == []


@given(first=_GOALS, second=_GOALS)
def test_a_call_in_the_same_direction_adds_to_what_is_pursued(first: Goal, second: Goal) -> None:
    goal = joined(first, second)
    assert joined(None, first) == first
    if type(first) is not type(second):
        assert goal == second
        return
    walk = Walk(shares_devices=isinstance(first, WakeGoal))
    walk.go(goal)
    assert walk.go(second) == []
    assert includes(goal, second)
    if includes(goal, first):
        assert walk.go(first) == []
    else:
        assert goal == second, "it names an earlier version: that of the first may never come"


def test_a_later_call_for_an_earlier_version_replaces_what_is_pursued() -> None:
    never, now = WakeGoal(WAKE_STEP_GENERATING, V2), WakeGoal(WAKE_STEP_MEMORY, V1)
    assert joined(never, now) == now
    assert joined(now, never) == never
    assert joined(never, WakeGoal(WAKE_STEP_MEMORY, None)) == never, "it names none"


def test_who_is_left_asleep_gives_groups_back_and_who_is_asked_to_sleep_holds_them() -> None:
    wakes, sleeps = WakeGoal(WAKE_STEP_VERIFIED, V1), SleepGoal(SLEEP_LEVEL_WITHOUT_WEIGHTS)
    assert gives_groups_back(wakes, None, awaited=False), "it failed"
    assert gives_groups_back(wakes, wakes, awaited=False), "its caller has gone on to others"
    assert not gives_groups_back(wakes, wakes, awaited=True)
    assert not gives_groups_back(wakes, sleeps, awaited=True)
    assert not gives_groups_back(sleeps, None, awaited=False)


def test_a_learner_that_was_replaced_is_refused() -> None:
    fence = Fence()
    fence.observe(PolicyVersion(2, 9))
    fence.check(2)
    fence.observe(None)
    with pytest.raises(FencedError, match="incarnation 1 is over: 2 has been seen"):
        fence.check(1)
    fence.observe(PolicyVersion(3, 0))
    with pytest.raises(FencedError, match="3 has been seen"):
        fence.check(2)


def test_a_caller_cannot_lock_learners_out_by_a_high_incarnation() -> None:
    fence = Fence()
    fence.observe(PolicyVersion(2, 9))
    for _ in range(2):
        with pytest.raises(UnreachableError, match="has not named incarnation 4294967295 yet, the last is 2"):
            fence.check(2**32 - 1)
    fence.check(2)
