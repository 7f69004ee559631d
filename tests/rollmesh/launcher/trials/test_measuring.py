"""Seconds per batch from records: whole turns, without evaluations and without what was generated before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollmesh.launcher.trials.disturbances import MeshState, Watch
from rollmesh.launcher.trials.estimates import UNKNOWN, Bounds
from rollmesh.launcher.trials.measuring import MeasuringRules, Meter, least_batches
from rollmesh.mesh.config import load_config
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
    found = Meter("collocated", MeasuringRules(4, 0.0, 9)).add(IN_TURNS, TURNS)
    assert found is not None
    assert found.batch_s == pytest.approx(2.0)
    assert found.batches == 4
    assert found.generation == Bounds(0.0, pytest.approx(1.0))
    assert found.training == Bounds(pytest.approx(0.5), pytest.approx(0.5))
    assert found.swap_s == pytest.approx(0.5)
    hybrid = Meter("hybrid", MeasuringRules(4, 0.0, 9)).add(IN_TURNS, TURNS)
    assert hybrid is not None
    assert (hybrid.generation, hybrid.training) == (UNKNOWN, UNKNOWN)


@pytest.mark.parametrize("rules", [MeasuringRules(5, 0.0, 0), MeasuringRules(1, 8.5, 0)])
def test_too_little_is_no_measurement(rules: MeasuringRules) -> None:
    """The last turn may not be over: two whole ones are left."""
    assert Meter("collocated", rules).add(IN_TURNS, TURNS) is None


@pytest.mark.parametrize(
    ("waited", "generation", "training_s"), [(0.6, Bounds(1.0, 1.0), 0.4), (0.01, Bounds(0.0, 1.0), 0.99)]
)
def test_the_side_that_is_waited_for_shows_its_time(waited: float, generation: Bounds, training_s: float) -> None:
    # The first batches were generated before.
    steps = [step(1, 0.1), step(2, 0.2), *(step(3 + n, 1.2 + n, waited=waited) for n in range(5))]
    found = Meter("split", MeasuringRules(4, 0.0, 2)).add(steps, [])
    assert found is not None
    assert found.batch_s == pytest.approx(1.0)
    assert found.generation.low == pytest.approx(generation.low)
    assert found.generation.high == pytest.approx(generation.high)
    assert found.training.low == pytest.approx(training_s)


def evaluation(ended: float, seconds: float) -> dict[str, Any]:
    return {"step": 3, "time": ended, "eval/reward": 0.5, "eval/seconds": seconds}


def test_the_time_of_evaluations_is_subtracted() -> None:
    """The learner waits for the generators meanwhile; its own time does not become less by that."""
    steps = [
        step(1, 1.0),
        step(2, 2.0),
        evaluation(12.5, 10.0),
        step(3, 13.0, waited=10.5),
        step(4, 14.0),
        step(5, 15.0),
    ]
    found = Meter("split", MeasuringRules(4, 0.0, 0)).add(steps, [])
    assert found is not None
    assert (found.batch_s, found.batches) == (pytest.approx(1.0), 4)
    assert found.training.low == pytest.approx(0.875)


def test_turns_that_are_all_evaluated_are_measured() -> None:
    records = [
        record
        for one in IN_TURNS
        for record in ([one, evaluation(one["time"] + 2.6, 2.0)] if one["step"] % 2 else [one])
    ]
    found = Meter("collocated", MeasuringRules(4, 0.0, 9)).add(records, TURNS)
    assert found is not None
    assert found.batch_s == pytest.approx(1.0)
    assert found.training.low == pytest.approx(0.5)
    assert found.generation.high < 0.3


def test_batches_amid_an_evaluation_count_once_there_are_no_others() -> None:
    meter = Meter("split", MeasuringRules(2, 0.0, 0))
    found = None
    for number in range(20):
        assert found is None or number > 6
        found = found or meter.add([step(number, float(number)), evaluation(number + 0.5, 1.0)], [])
    assert found is not None
    assert (found.batch_s, found.batches) == (pytest.approx(1.0), 6)


def watch(*looks: tuple[float, str], restarts: Sequence[float] = ()) -> Watch:
    found = Watch(0.0)
    for at, disturbance in looks:
        found.look(at, MeshState(disturbance))
    for at in restarts:
        found.restarted(at)
    return found


def test_a_restart_of_the_learner_is_no_speed() -> None:
    """It continues at its checkpoint, quickly at first, for groups have waited for it."""
    steps = [step(1 + n, 1.0 + n) for n in range(4)]
    again = [step(3, 30.0), step(4, 30.1), *(step(5 + n, 31.1 + n) for n in range(3))]
    found = Meter("split", MeasuringRules(4, 0.0, 1)).add([*steps, *again], [])
    assert found is not None
    assert found.batch_s == pytest.approx(1.0)
    later = [dict(record, step=record["step"] + 9) for record in again]
    told = Meter("split", MeasuringRules(4, 0.0, 1)).add([*steps, *later], [], watch(restarts=[5.0]).is_disturbed)
    assert told == found


@pytest.mark.parametrize(
    "seen",
    [
        watch((9.5, ""), (10.5, "generator-0 is absent"), (18.0, "generator-0 is absent"), (18.5, "")),
        watch((9.5, ""), (10.0, "held"), (11.0, "")),
        watch(restarts=[10.0]),
    ],
)
def test_turns_amid_a_disturbance_are_left_out(seen: Watch) -> None:
    """The turn after it trains what was generated meanwhile."""
    late = [{**record, "time": record["time"] + (10.0 if record["step"] > 5 else 0.0)} for record in IN_TURNS]
    more = [
        step(2 * turn + batch, 4.0 * turn + 10.0 + (0.5, 1.0)[batch], turn=turn) for turn in (5, 6) for batch in (0, 1)
    ]
    found = Meter("collocated", MeasuringRules(4, 0.0, 9)).add([*late, *more], TURNS, seen.is_disturbed)
    assert found is not None
    assert (found.batch_s, found.batches) == (pytest.approx(2.0), 4)


def test_records_that_come_one_by_one_are_measured_alike_and_forgotten() -> None:
    whole, parts = (Meter("collocated", MeasuringRules(4, 1e9, 9)) for _ in range(2))
    whole.add(IN_TURNS, TURNS)
    before = 0.0
    for record in IN_TURNS:
        parts.add([record], [change for change in TURNS if before < change.began <= record["time"]])
        before = record["time"]
    assert parts._kept == whole._kept
    assert len(parts._phases) <= 8
    assert len(parts._open) <= 2


def test_the_least_number_of_steps_is_that_of_whole_turns_and_one_trial() -> None:
    asked = load_config(
        {"model": {"path": "m"}, "data": {"train": "t.jsonl"}},
        ["placement=auto", "placement.trial_batches=4", "placement.batches_per_turn=3", "buffer.max_staleness=2"],
    )
    assert least_batches(asked) == (10, 8)
