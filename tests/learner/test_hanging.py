"""A training thread that hangs while its event loop answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from learner.hanging import AT_LEAST_S, FACTOR, StepWatch
from mesh.errors import StuckError

ROOT = Path(__file__).parents[2]
HUNG = """
import asyncio, logging, threading
from learner.hanging import end_where_it_hangs
from learner.state import LearnerState

logging.basicConfig()
state = LearnerState(phase="training")
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()

async def one_step_is_done():
    asyncio.create_task(end_where_it_hangs(state, at_least_s=0.2)).add_done_callback(print)
    await asyncio.sleep(0)
    state.steps = 1

asyncio.run_coroutine_threadsafe(one_step_is_done(), loop).result()
threading.Event().wait()
"""


def seconds(watch: StepWatch, began: float, lasts: float, *, steps: int, training: bool = True) -> float | None:
    """Looks every five seconds; the first verdict."""
    looks = (watch.look(began + at, training=training, steps=steps) for at in range(0, int(lasts) + 1, 5))
    return next((found for found in looks if found is not None), None)


def test_a_step_far_beyond_the_longest_hangs() -> None:
    watch = StepWatch()
    assert seconds(watch, 0, 10 * AT_LEAST_S, steps=7) is None, "the first one may compile"
    watch = StepWatch()
    for steps in range(3):
        assert seconds(watch, 100 * steps, 60, steps=steps) is None
    assert watch.longest_s == 60
    assert seconds(watch, 1000, FACTOR * 60, steps=3) is None
    assert watch.look(1000 + FACTOR * 60 + 5, training=True, steps=3) == FACTOR * 60 + 5


@pytest.mark.parametrize("training", [True, False])
def test_short_steps_have_ten_minutes_and_waits_have_all_the_time(training: bool) -> None:
    watch = StepWatch()
    for steps in range(3):
        watch.look(steps, training=True, steps=steps)
    assert seconds(watch, 10, AT_LEAST_S, steps=3, training=training) is None
    found = watch.look(AT_LEAST_S + 15, training=training, steps=3)
    assert (found is not None) == training


def test_a_learner_that_was_stopped_does_not_hang() -> None:
    watch = StepWatch()
    for now, steps in ((0.0, 0), (1.0, 1), (2.0, 1), (10 * AT_LEAST_S, 1)):
        assert watch.look(now, training=True, steps=steps) is None


def test_the_process_ends_by_name() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HUNG], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == StuckError.exit_code, ended.stderr
    assert "the step after 1 has lasted for" in ended.stderr
