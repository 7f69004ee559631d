"""The end of trainings of which few steps are finite, or none."""

from __future__ import annotations

import math

import pytest

from rollmesh.learner.engines.interface import StepResult
from rollmesh.learner.trainers.finite_steps import FiniteSteps
from rollmesh.mesh.errors import DivergedError

FINITE, NOTHING = StepResult({"loss": 1.0}, skipped=False), StepResult({}, skipped=False)
OTHERS = [
    StepResult({"loss": math.nan}, skipped=True),
    StepResult({"loss": 1.0}, skipped=True),
    StepResult({"loss": math.inf}, skipped=False),
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_training_ends_with_at_least_one_finite_step(other: StepResult) -> None:
    steps = FiniteSteps()
    for result in (NOTHING, other, other):
        steps.record(result)
    assert steps.missing
    with pytest.raises(DivergedError, match="none of 2 steps had a finite loss"):
        steps.check_end()
    for result in (FINITE, other):
        steps.record(result)
        steps.check_end()


def test_a_step_of_an_earlier_process_counts_and_so_does_a_training_with_nothing_to_train() -> None:
    for steps, result in ((FiniteSteps(before=True), OTHERS[0]), (FiniteSteps(), NOTHING)):
        steps.record(result)
        assert not steps.missing
        steps.check_end()
