"""The dataflows of `examples/dataflows` in the real mesh: files of a user's, named by path in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.mesh import MeshRun, audit

_HERE = "examples/dataflows"
_COMMON = (
    "--rollout.replicas=1",
    "--rollout.n=4",
    "--learner.optimizer.lr=4e-4",
    "--learner.optimizer.warmup_steps=5",
    "--eval.stop_at=null",
    "--eval.rows=32",
)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_student_comes_closer_to_its_teacher(
    start_mesh: Callable[..., MeshRun], warm_data: Path, prepared: Callable[[int], Path]
) -> None:
    """The teacher: the same model, supervised for longer."""
    run = start_mesh(
        *_COMMON,
        f"--model.path={warm_data / 'model'}",
        f"--algorithm={_HERE}/distillation.py:Distillation",
        f"--learner.roles.teacher.path={prepared(300) / 'model'}",
        "--data.eval=null",
        "--learner.steps=50",
    )
    assert run.finish(180) == 0, run.tail()
    audit(run)
    first, last = run.trend("distillation/reverse_kl")
    assert last < 0.9 * first, (first, last)
    assert run.summary()["steps"] == 50


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("wrong", "named"),
    [("--algorithm.discuont=1", "did you mean 'discount'"), ("--learner.roles.critic.path=x", "learner.roles.critic")],
)
def test_what_the_dataflow_does_not_know_is_refused_at_start(
    start_mesh: Callable[..., MeshRun], wrong: str, named: str
) -> None:
    run = start_mesh(f"--algorithm={_HERE}/distillation.py:Distillation", wrong)
    assert run.finish(60) != 0
    assert named in " ".join(run.lines)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_best_of_n_becomes_more_likely(start_mesh: Callable[..., MeshRun], warm_data: Path) -> None:
    run = start_mesh(
        *_COMMON,
        f"--model.path={warm_data / 'model'}",
        f"--algorithm={_HERE}/rejection_sampling.py:RejectionSampling",
        "--learner.steps=50",
    )
    assert run.finish(180) == 0, run.tail()
    audit(run)
    first, last = run.trend("rejection_sampling/log_likelihood")
    assert last > first, (first, last)
    first, last = run.trend("critic/score/mean")
    assert last > first, (first, last)
    assert set(run.metric("rejection_sampling/chosen")) == {32.0}
    counters = run.summary()["ledger"]["train"]
    assert counters["counters"]["filtered"] > 0
    assert any("no_right_response" in reason for reason in counters["reasons"]), counters["reasons"]
