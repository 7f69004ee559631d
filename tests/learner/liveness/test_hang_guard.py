"""A training thread that hangs while its event loop answers."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from rollmesh.learner.liveness.hang_guard import AT_LEAST_S, FACTOR, HangWatch
from rollmesh.learner.placement.swap import Phase
from rollmesh.learner.status import PlacementView
from rollmesh.mesh.errors import RollmeshError, StalledError, StuckError
from tests.repository import REPOSITORY

HUNG = """
import asyncio, logging, sys, threading
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.liveness.hang_guard import end_process_on_hang
from rollmesh.learner.status import LearnerStatus, PlacementView
from rollmesh.mesh.errors import StalledError

logging.basicConfig()
phase, judges_steps, fails = sys.argv[1], sys.argv[2] == "steps", sys.argv[3] == "fails"
status, controls = LearnerStatus(phase=phase), ControlRequests()
if phase == "swapping":
    status.placement = PlacementView("collocated", "offloading", 0.0, 1, 0)
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()

async def one_step_is_done():
    watch = end_process_on_hang(status, controls, judges_steps=judges_steps, first_s=1000.0, move_s=0.1, at_least_s=0.2)
    asyncio.create_task(watch).add_done_callback(print)
    await asyncio.sleep(0)
    status.steps = 1
    if fails:
        controls.fail(StalledError("nothing has moved"))

asyncio.run_coroutine_threadsafe(one_step_is_done(), loop).result()
threading.Event().wait()
"""


def seconds(watch: HangWatch, began: float, lasts: float, *, steps: int, training: bool = True) -> float | None:
    """Looks every five seconds; the first verdict."""
    looks = (watch.observe(began + at, training=training, steps=steps) for at in range(0, int(lasts) + 1, 5))
    return next((found for found in looks if found is not None), None)


def test_a_step_far_beyond_the_longest_hangs() -> None:
    watch = HangWatch(math.inf)
    for steps in range(3):
        assert seconds(watch, 100 * steps, 60, steps=steps) is None
    assert watch.longest_s == 60
    assert seconds(watch, 1000, FACTOR * 60, steps=3) is None
    assert watch.observe(1000 + FACTOR * 60 + 5, training=True, steps=3) == FACTOR * 60 + 5


@pytest.mark.parametrize("training", [True, False])
def test_short_steps_have_ten_minutes_and_waits_have_all_the_time(training: bool) -> None:
    watch = HangWatch(math.inf)
    for steps in range(3):
        watch.observe(steps, training=True, steps=steps)
    assert seconds(watch, 10, AT_LEAST_S, steps=3, training=training) is None
    found = watch.observe(AT_LEAST_S + 15, training=training, steps=3)
    assert (found is not None) == training


def test_a_move_of_memory_has_the_time_of_a_step_of_a_swap() -> None:
    """However long steps of training last."""
    watch = HangWatch(math.inf, move_s=2 * AT_LEAST_S)
    watch.observe(0, training=True, steps=1)
    watch.observe(1, training=False, steps=1, move=Phase.OFFLOADING)
    for at in range(5, 4 * int(AT_LEAST_S), 5):
        move = Phase.OFFLOADING if at < AT_LEAST_S else Phase.ONLOADING
        found = watch.observe(at, training=False, steps=1, move=move)
        assert (found is not None) == (at > 3 * AT_LEAST_S)
    assert watch.longest_s < AT_LEAST_S, "of steps alone"


def test_moves_are_those_of_a_swap() -> None:
    moves = {phase for phase in Phase if PlacementView("collocated", phase, 0.0, 1, 0).move}
    assert moves == {Phase.ONLOADING, Phase.OFFLOADING}


def test_a_learner_that_was_stopped_does_not_hang() -> None:
    watch = HangWatch(math.inf)
    for now, steps in ((0.0, 0), (1.0, 1), (2.0, 1), (10 * AT_LEAST_S, 1)):
        assert watch.observe(now, training=True, steps=steps) is None


@pytest.mark.parametrize(
    ("first_s", "hangs_after_s"), [(3 * AT_LEAST_S, 3 * AT_LEAST_S), (1.0, AT_LEAST_S), (math.inf, None)]
)
def test_a_first_step_may_compile_for_so_long(first_s: float, hangs_after_s: float | None) -> None:
    found = seconds(HangWatch(first_s), 0, 10 * AT_LEAST_S, steps=7)
    assert found == (None if hangs_after_s is None else hangs_after_s + 5)


@pytest.mark.parametrize("training", [True, False])
def test_an_error_has_to_be_heard_whatever_the_thread_does(training: bool) -> None:
    watch = HangWatch(math.inf)
    for at in range(0, int(AT_LEAST_S) + 1, 5):
        assert watch.observe(at, training=training, steps=at // 300, error_pending=True) is None
    assert watch.observe(AT_LEAST_S + 5, training=training, steps=0) is None, "the learner has begun to end"
    assert watch.observe(AT_LEAST_S + 10, training=training, steps=0, error_pending=True) == AT_LEAST_S + 5


@pytest.mark.parametrize(
    ("phase", "judged", "fails", "error", "told"),
    [
        ("training", "steps", "well", StuckError, "the step after 1 has lasted for"),
        ("waiting_for_groups", "steps", "fails", StalledError, "the main thread (waiting_for_groups) has not begun"),
        ("swapping", "steps", "well", StuckError, "offloading of the learner's memory has lasted for"),
        ("training", "errors", "fails", StalledError, "nothing has moved"),
    ],
)
def test_the_process_ends_by_name(phase: str, judged: str, fails: str, error: type[RollmeshError], told: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HUNG, phase, judged, fails],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == error.exit_code, ended.stderr
    assert told in ended.stderr
