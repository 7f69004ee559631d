"""Calls that wait for a goal: those that another replaces, and goals that no call waits for."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.generators.placement import callers as callers_module
from rollmesh.generators.placement.callers import Callers
from rollmesh.generators.placement.turn_state import SleepGoal, WakeGoal
from rollmesh.mesh.errors import SwapError, UnreachableError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos.generator_pb2 import (
    SLEEP_LEVEL_FROZEN,
    SLEEP_LEVEL_WITHOUT_WEIGHTS,
    WAKE_STEP_GENERATING,
    WAKE_STEP_MEMORY,
)

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
WAKE = WakeGoal(WAKE_STEP_GENERATING, V2)


async def test_calls_that_another_replaces_fail_and_others_wait_on() -> None:
    callers = Callers(lambda: None)
    memory, later = callers.add(WakeGoal(WAKE_STEP_MEMORY, V2)), callers.add(WAKE)
    earlier = callers.add(WakeGoal(WAKE_STEP_GENERATING, V1))
    assert callers.goal == earlier.goal
    assert isinstance(later.done.exception(), SwapError)
    callers.answer(lambda goal: isinstance(goal, WakeGoal) and goal.step == WAKE_STEP_MEMORY)
    assert memory.done.done()
    assert not earlier.done.done()
    asleep = callers.add(SleepGoal(SLEEP_LEVEL_FROZEN)), callers.add(SleepGoal(SLEEP_LEVEL_WITHOUT_WEIGHTS))
    assert isinstance(earlier.done.exception(), SwapError)
    callers.close(UnreachableError("over"))
    assert all(isinstance(caller.done.exception(), UnreachableError) for caller in asleep)


async def test_a_goal_to_wake_ends_once_nobody_has_waited_for_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers_module, "ABANDONED_S", 0.0)
    ended = asyncio.Event()
    callers = Callers(ended.set)
    first, second = callers.add(WAKE), callers.add(WAKE)
    callers.remove(first)
    await asyncio.sleep(0.01)
    assert callers.goal == WAKE, "another one waits"
    callers.remove(second)
    again = callers.add(WAKE)
    await asyncio.sleep(0.01)
    assert callers.goal == WAKE, "it came again"
    callers.remove(again)
    await asyncio.wait_for(ended.wait(), 60)
    assert (callers.goal, callers.abandoned) == (None, WAKE)
    callers.remove(callers.add(SleepGoal(SLEEP_LEVEL_FROZEN)))
    await asyncio.sleep(0.01)
    assert (callers.goal, callers.abandoned) == (SleepGoal(SLEEP_LEVEL_FROZEN), None), "memory is given back anyway"
