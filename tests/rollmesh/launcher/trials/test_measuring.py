"""Seconds per batch from records: whole turns, without evaluations and without what was generated before."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.launcher.trials.estimates import UNKNOWN, Bounds
from rollmesh.launcher.trials.measuring import MeasuringRules, measure
from rollmesh.report.turns import PhaseChange


def step(number: int, at: float, *, turn: int | None = None, waited: float = 0.0) -> dict[str, Any]:
    record = {"step": number, "time": at, "critic/score/mean": 0.0, "timing_s/gen": waited}
    return record if turn is None else {**record, "placement/turns": float(turn)}


# A turn of two batches every 4 s: 2 s of generation, 1 s of training, 1 s in swaps.
TURNS = [
    PhaseChange(4.0 * turn + offset, turn, phase, "")
    for turn in range(6)
    for offset, phase in ((0.0, "training"), (1.0, "offloading"), (1.5, "generating"), (3.5, "freezing"))
]
IN_TURNS = [
    step(2 * turn + batch, 4.0 * turn + (0.5, 1.0)[batch], turn=turn) for turn in range(1, 5) for batch in (0, 1)
]


def test_turns_are_measured_whole_and_by_side() -> None:
    found = measure("collocated", IN_TURNS, TURNS, MeasuringRules(4, 0.0, 9))
    assert found is not None
    assert found.batch_s == pytest.approx(2.0)
    assert found.batches == 4
    assert found.generation == Bounds(0.0, pytest.approx(1.0))
    assert found.training == Bounds(pytest.approx(0.5), pytest.approx(0.5))
    assert found.swap_s == pytest.approx(0.5)
    hybrid = measure("hybrid", IN_TURNS, TURNS, MeasuringRules(4, 0.0, 9))
    assert hybrid is not None
    assert (hybrid.generation, hybrid.training) == (UNKNOWN, UNKNOWN)


@pytest.mark.parametrize("rules", [MeasuringRules(5, 0.0, 0), MeasuringRules(1, 8.5, 0)])
def test_too_little_is_no_measurement(rules: MeasuringRules) -> None:
    """The last turn may not be over: two whole ones are left."""
    assert measure("collocated", IN_TURNS, TURNS, rules) is None


@pytest.mark.parametrize(
    ("waited", "generation", "training_s"), [(0.6, Bounds(1.0, 1.0), 0.4), (0.01, Bounds(0.0, 1.0), 0.99)]
)
def test_the_side_that_is_waited_for_shows_its_time(waited: float, generation: Bounds, training_s: float) -> None:
    # The first batches were generated before.
    steps = [step(1, 0.1), step(2, 0.2), *(step(3 + n, 1.2 + n, waited=waited) for n in range(5))]
    found = measure("split", steps, [], MeasuringRules(4, 0.0, 2))
    assert found is not None
    assert found.batch_s == pytest.approx(1.0)
    assert found.generation.low == pytest.approx(generation.low)
    assert found.generation.high == pytest.approx(generation.high)
    assert found.training.low == pytest.approx(training_s)


def test_evaluations_are_left_out() -> None:
    evaluation = {"step": 3, "time": 13.0, "eval/reward": 0.5, "eval/seconds": 10.0}
    steps = [step(1, 1.0), step(2, 2.0), step(3, 3.0), step(4, 14.0), step(5, 15.0)]
    found = measure("split", [*steps, evaluation], [], MeasuringRules(3, 0.0, 0))
    assert found is not None
    assert (found.batch_s, found.batches) == (pytest.approx(1.0), 3)
