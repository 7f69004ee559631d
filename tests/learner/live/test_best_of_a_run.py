"""The best checkpoint of a real run: kept, listed, exported, continued from."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rollmesh.checkpoint_choice import best_checkpoint_path
from rollmesh.cli.app import app
from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.evaluation.result_log import ResultLog
from rollmesh.learner.recovery.consumption_log import read_log
from rollmesh.mesh.errors import DataError
from tests.learner.live.test_runs import wait_for_line
from tests.learner.live.tiny import make_config, meanwhile, mesh_of, run_learner


def test_the_best_version_is_kept_listed_exported_and_gone_on_from(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = {
        "learner.steps": 100_000,
        "checkpoint.keep": 2,
        "checkpoint.every_s": None,
        "checkpoint.every_steps": 2,
        "eval.every_steps": 1,
        "eval.n": 2,
        "eval.temperature": 1.0,
        # The reward rises as a rule: the least is at an early version.
        "eval.direction": "min",
        "eval.metric": "mean@2",
        "eval.keep_rows": 3,
        "checkpoint.hf": ["last", "best"],
    }
    config = make_config(tmp_path, overrides)
    run = config.run.folder
    log = run / "consumption.jsonl"

    def end_it() -> None:
        wait_for_line(log, lambda line: line["train_version"] == 4)
        os.kill(os.getpid(), signal.SIGTERM)

    with mesh_of(config) as mesh:
        # Ended in order before its last step: the generator stays.
        with meanwhile(end_it):
            assert run_learner(config, mesh) == 0
        results = ResultLog(run).results()
        assert results[0]["version"] == 0
        assert not (run / "hf").exists(), "the run is not complete"
        best = best_checkpoint(run / "checkpoints")
        assert best is not None
        least = min(result["metrics"]["mean@2"] for result in results)
        first = next(result["version"] for result in results if result["metrics"]["mean@2"] == least)
        assert (best.value, best.version, best.incarnation) == (least, first, 1)
        kept = [policy.version for policy, _ in CheckpointStore(run / "checkpoints").list()]
        assert best.version in kept
        # The last two, the best, and the one whose evaluation was under way when the last one came.
        assert len(kept) <= 4
        rows = ResultLog(run).rows(1, best.version)
        assert [len(row["responses"]) for row in rows] == [2, 2, 2]
        assert all(response["reward"] is not None for row in rows for response in row["responses"])

        # Named before anything is trained, with the way back.
        root = run / "checkpoints"
        before, last = [path for _, path in CheckpointStore(root).list()][-2:]
        for broken, said in ((root / "best.json", "best.json"), (last / "digests.json", before.name)):
            whole = broken.read_bytes()
            broken.write_text("[]")
            capfd.readouterr()
            assert run_learner(config, mesh) == DataError.exit_code
            assert said in capfd.readouterr().err
            broken.write_bytes(whole)

        shorter = config.learner.model_copy(update={"steps": best.version + 2})
        config = config.model_copy(update={"learner": shorter})
        assert run_learner(config, mesh, start_from=best_checkpoint_path(run)) == 0
    again = [use for use in read_log(log) if use.incarnation == 2]
    assert [use.train_version for use in again] == [best.version, best.version + 1]
    assert again[0].resumed_at == best.version
    found = ResultLog(run).results()
    assert {result["incarnation"] for result in found} == {1, 2}

    list_checkpoints = CliRunner().invoke(app, ["evals", str(run)])
    assert list_checkpoints.exit_code == 0, list_checkpoints.output
    assert [line.split()[0] for line in list_checkpoints.output.splitlines()][1:] == [
        f"{result['incarnation']}:{result['version']}" for result in found
    ]
    assert list_checkpoints.output.count("best by mean@2") == 1
    shown = CliRunner().invoke(app, ["evals", str(run), "--version", f"1:{best.version}", "-n", "1"])
    assert len(shown.output.splitlines()) == 3, shown.output
    exported = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), "--checkpoint", "best"])
    assert exported.exit_code == 0, exported.output
    assert str(best_checkpoint_path(run)) in exported.output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = "model.safetensors"
    assert (run / "hf" / "best" / weights).read_bytes() == (tmp_path / "out" / weights).read_bytes()
    assert sorted(path.name for path in (run / "hf").iterdir()) == ["best", "last"]
