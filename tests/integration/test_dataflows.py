"""Distillation, and the dataflow of `examples/dataflows`: a user's file, named by path in the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import sevens
from tests.integration.training import train

pytestmark = pytest.mark.slow
_HERE = "examples/dataflows"
_DEMO = "examples/demo/demo.yaml"
_STEPS = 24


@pytest.mark.exhaustive
def test_a_student_comes_closer_to_its_teacher(warm_data: Path, demo_data: Path, tmp_path: Path) -> None:
    """The teacher: the same model, supervised for longer. That a mesh trains it: tests/learner/live."""
    run = train(
        *(_DEMO, demo_data, tmp_path),
        rollout__n=4,
        learner__optimizer__lr=6e-4,
        learner__optimizer__warmup_steps=2,
        learner__batch__groups=12,
        learner__steps=_STEPS,
        algorithm="on_policy_distillation",
        reward__functions=["none"],
        learner__roles__teacher__path=str(warm_data / "model"),
    )
    assert len(run.metric("actor/loss")) == _STEPS
    first, last = run.trend("distillation/reverse_kl")
    assert last < 0.9 * first, (first, last)


def test_the_best_of_n_becomes_more_likely(demo_data: Path, tmp_path: Path) -> None:
    groups = 8
    run = train(
        *(_DEMO, demo_data, tmp_path),
        rollout__n=4,
        learner__optimizer__lr=2e-3,
        learner__optimizer__warmup_steps=1,
        learner__batch__groups=groups,
        learner__steps=10,
        algorithm={"name": f"{_HERE}/rejection_sampling.py:RejectionSampling", "threshold": 0.2},
        reward__functions=[f"{sevens.__file__}:score"],
    )
    first, last = run.trend("rejection_sampling/log_likelihood")
    assert last > first, (first, last)
    first, last = run.trend("critic/score/mean")
    assert last > first, (first, last)
    assert set(run.metric("rejection_sampling/chosen")) == {float(groups)}
    counters = run.ledger.counters
    assert counters.filtered > 0
    assert any("no_right_response" in reason for reason in counters.reasons), counters.reasons
