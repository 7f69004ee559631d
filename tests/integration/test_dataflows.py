"""Distillation, and the dataflow of `examples/dataflows`: a user's file, named by path in the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.training import train

pytestmark = pytest.mark.slow
_HERE = "examples/dataflows"
_DEMO = "examples/demo/demo.yaml"
_SHORT: dict[str, Any] = {
    "rollout__n": 4,
    "learner__optimizer__lr": 4e-4,
    "learner__optimizer__warmup_steps": 5,
    "learner__steps": 50,
}


def test_a_student_comes_closer_to_its_teacher(demo_data: Path, warm_data: Path, tmp_path: Path) -> None:
    """The teacher: the same model, supervised for longer."""
    run = train(
        *(_DEMO, demo_data, tmp_path),
        **_SHORT | {"learner__steps": 30},
        algorithm="on_policy_distillation",
        reward__functions=["none"],
        learner__roles__teacher__path=str(warm_data / "model"),
    )
    assert len(run.metric("actor/loss")) == 30
    first, last = run.trend("distillation/reverse_kl")
    assert last < 0.9 * first, (first, last)


def test_the_best_of_n_becomes_more_likely(warm_data: Path, tmp_path: Path) -> None:
    run = train(*(_DEMO, warm_data, tmp_path), **_SHORT, algorithm=f"{_HERE}/rejection_sampling.py:RejectionSampling")
    first, last = run.trend("rejection_sampling/log_likelihood")
    assert last > first, (first, last)
    first, last = run.trend("critic/score/mean")
    assert last > first, (first, last)
    assert set(run.metric("rejection_sampling/chosen")) == {32.0}
    counters = run.ledger.counters
    assert counters.filtered > 0
    assert any("no_right_response" in reason for reason in counters.reasons), counters.reasons
