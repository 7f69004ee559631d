"""The choice among placements: nothing slower stays, and no placement is tried twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.launcher.trials.choice import TIE, best_placement, next_trial
from rollmesh.launcher.trials.estimates import Bounds, Division, Measurement, estimate

seconds = st.floats(0.01, 100.0)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, tuple[float, Bounds]]:
    """True seconds per batch of placements, and bounds that hold; those in turns are known."""
    true = draw(st.lists(seconds, min_size=1, max_size=8))
    found = {}
    for index, value in enumerate(true):
        below, above = draw(st.floats(0.0, 1.0)), draw(st.floats(1.0, 10.0))
        found[f"placement-{index}"] = (value, Bounds(value * below, value * above))
    return found


@given(worlds(), st.sets(st.integers(0, 7)))
def test_trials_end_and_what_stays_is_as_fast_as_any(world: dict[str, tuple[float, Bounds]], failing: set[int]) -> None:
    names = list(world)
    present, measured = names[0], {names[0]: world[names[0]][0]}
    while (
        name := next_trial(
            {name: bounds for name, (_, bounds) in world.items()}, measured, cost_s=0.0, batches_left=1000
        )
    ) is not None:
        assert name not in measured
        measured[name] = math.inf if names.index(name) in failing else world[name][0]
        present = name
    stays = best_placement(present, measured)
    works = {name: value for name, (value, _) in world.items() if name == names[0] or names.index(name) not in failing}
    assert stays in works
    assert works[stays] <= min(works.values()) * (1 + TIE) / (1 - TIE)


def test_a_placement_that_cannot_be_faster_is_not_tried() -> None:
    measured = {"collocated": 1.0}
    assert next_trial({"split": Bounds(0.99, 2.0)}, measured, cost_s=0.0, batches_left=10) is None
    assert next_trial({"split": Bounds(0.9, 2.0)}, measured, cost_s=0.0, batches_left=10) == "split"


def test_a_trial_that_cannot_pay_off_before_the_end_is_left_out() -> None:
    estimates, measured = {"split": Bounds(0.5, 2.0)}, {"collocated": 1.0}
    assert next_trial(estimates, measured, cost_s=10.0, batches_left=10) is None
    assert next_trial(estimates, measured, cost_s=10.0, batches_left=40) == "split"


def test_the_one_that_may_be_fastest_comes_first_and_among_equals_the_one_that_is_less_likely_slow() -> None:
    estimates = {"hybrid": Bounds(0.5, 1.0), "split": Bounds(0.4, 2.0), "another split": Bounds(0.4, 1.5)}
    measured = {"collocated": 1.0}
    assert next_trial(estimates, measured, cost_s=0.0, batches_left=9) == "another split"
    measured["another split"] = 0.7
    assert next_trial(estimates, measured, cost_s=0.0, batches_left=9) == "split"


@pytest.mark.parametrize(
    ("split_s", "stays"), [(0.98, "collocated"), (0.9, "split"), (1.1, "collocated"), (math.inf, "collocated")]
)
def test_ties_stay(split_s: float, stays: str) -> None:
    assert best_placement("collocated", {"collocated": 1.0, "split": split_s}) == stays


amounts = st.floats(0.1, 10.0)


@given(amounts, amounts, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(2, 16), st.data())
def test_estimates_hold_whatever_part_of_a_side_gains_by_more_cores(
    training_s: float,
    generation_s: float,
    linear_training: float,
    linear_generation: float,
    cores: int,
    data: st.DataObject,
) -> None:
    """Times as Amdahl has them: a part of each side gains in proportion to its cores, the rest nothing."""

    def time(all_s: float, linear: float, own: int) -> float:
        return all_s * (1 - linear + linear * cores / own)

    turns = Division("collocated", cores, cores)
    seen = {
        turns: Measurement(
            training_s + generation_s, 8, Bounds(0.0, generation_s), Bounds(training_s, training_s), swap_s=0.0
        )
    }
    assert estimate(turns, seen) == Bounds(training_s + generation_s, training_s + generation_s)
    for learner in data.draw(st.lists(st.integers(1, cores - 1), min_size=1, max_size=4, unique=True)):
        train = time(training_s, linear_training, learner)
        generate = time(generation_s, linear_generation, cores - learner)
        split = Division("split", learner, cores - learner)
        bounds = estimate(split, seen)
        true = max(train, generate)
        assert bounds.low <= true * (1 + 1e-9)
        assert true <= bounds.high * (1 + 1e-9)
        waits = generate > train
        generation = Bounds(true, true) if waits else Bounds(0.0, true)
        seen[split] = Measurement(true, 8, generation, Bounds(train, train))


def test_hybrid_adds_what_the_learners_devices_generate_between_turns() -> None:
    """Own generators need 2 s, those in turns too, a turn 1 s: in 1.5 s they make 0.75 and 0.25 of a batch."""
    seen = {
        Division("collocated", 2, 2): Measurement(3.0, 8, Bounds(0.0, 1.0), Bounds(1.0, 1.0)),
        Division("split", 1, 1): Measurement(2.0, 8, Bounds(2.0, 2.0), Bounds(1.0, 1.0)),
    }
    bounds = estimate(Division("hybrid", 1, 1), seen)
    assert bounds.low == bounds.high == pytest.approx(1.5)
