"""The dataflows of `examples/dataflows` in the real mesh: files of a user's, named by path in the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from examples.demo.prepare import prepare
from tests.integration.mesh import MeshRun, audit

_HERE = "examples/dataflows"
_COMMON = (
    "--rollout.replicas=1",
    "--rollout.n=4",
    "--learner.optimizer.warmup_steps=5",
    "--eval.stop_at=null",
    "--eval.rows=32",
)


def values(run: MeshRun, name: str) -> list[float]:
    """A metric by step."""
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def trend(run: MeshRun, name: str) -> tuple[float, float]:
    """Means of a metric over the first and the last fifth of the steps."""
    found = values(run, name)
    fifth = len(found) // 5
    return fmean(found[:fifth]), fmean(found[-fifth:])


@pytest.fixture(scope="session")
def warm_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gets some problems right."""
    folder = tmp_path_factory.mktemp("warm-data")
    prepare(folder, task="arithmetic", seed=0, largest_digit=4, held_out=32, warm_steps=60)
    return folder


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, supervised for longer."""
    folder = tmp_path_factory.mktemp("teacher")
    prepare(folder, task="arithmetic", seed=0, largest_digit=4, held_out=32, warm_steps=300)
    return folder / "model"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_student_comes_closer_to_its_teacher(
    start_mesh: Callable[..., MeshRun], warm_data: Path, teacher: Path
) -> None:
    run = start_mesh(
        *_COMMON,
        f"--model.path={warm_data / 'model'}",
        f"--algorithm={_HERE}/distillation.py:Distillation",
        f"--learner.roles.teacher.path={teacher}",
        "--data.eval=null",
        "--learner.steps=80",
    )
    assert run.finish(180) == 0, run.tail()
    audit(run)
    first, last = trend(run, "distillation/reverse_kl")
    assert last < 0.85 * first, (first, last)
    assert run.summary()["steps"] == 80


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
        "--learner.steps=80",
    )
    assert run.finish(180) == 0, run.tail()
    audit(run)
    first, last = trend(run, "rejection_sampling/log_likelihood")
    assert last > first, (first, last)
    summary = run.summary()
    assert summary["held_out_last"] > summary["held_out_first"]
    assert set(values(run, "rejection_sampling/chosen")) == {32.0}
    counters = summary["ledger"]["train"]
    assert counters["counters"]["filtered"] > 0
    assert any("no_right_response" in reason for reason in counters["reasons"]), counters["reasons"]
