"""Trackers of services: curves, tables of samples, and one run however many learners continue it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.metrics import MetricsWriter, open_trackers
from rollmesh.learner.metrics.trackers.mlflow import MlflowTracker
from rollmesh.learner.metrics.trackers.opening import check_trackers
from rollmesh.learner.metrics.trackers.sample_table import COLUMNS, as_markdown
from rollmesh.learner.recovery.run_id import RUN_ID, take_run_id
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError
from tests.secrets_here import files_with

STEP = {
    "time": 1.7e9,
    "critic/score/mean": 0.5,
    "response_length/mean": 3.0,
    "staleness/mean": 0.0,
    "staleness/histogram": {"0": 1},
    "tokens_per_second": 9.0,
    "timing_s/gen": 0.1,
    "timing_s/step": 0.2,
    "eval/reward": 0.5,
    "eval/reward/sums": 0.5,
    "mismatch_warning": "none",
    "dropped/user's reason?": 1,
}
SAMPLE = {
    "step": 1,
    "prompt": "2 + 2 | is\n",
    "response": "<b>4</b>",
    "reward": 1.0,
    "components": {"total": 1.0},
    "ground_truth": 4,
    "data_source": "sums",
    "finish_reason": "stop",
}


def config(folder: Path, **logging_section: Any) -> Config:
    return load_config(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "run": {"dir": str(folder), "name": "r"},
            "logging": logging_section,
        }
    )


def write(run: Config, *steps: int) -> None:
    """Writes the records of one learner."""
    writer = MetricsWriter(open_trackers(run))
    for step in steps:
        writer.log(step, STEP)
        writer.submit(lambda step=step: writer.write_samples(step, [SAMPLE | {"step": step}]))  # type: ignore[misc]
    writer.close()
    assert writer.lost_records() == {"trackers/lost_records": 0}


def test_a_table_in_markdown_stays_a_table() -> None:
    header, rule, row = as_markdown([SAMPLE]).splitlines()
    assert header.count("|") == rule.count("|") == row.count("|") == len(COLUMNS) + 1
    assert "<" not in row
    assert "4" in row


def test_tensorboard_holds_curves_and_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(config(tmp_path, tensorboard=True), 1, 2)
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.5), (2, 0.5)]
    assert [e.step for e in events.Tensors("completions/text_summary")] == [1, 2]
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 2


def test_wandb_offline_keeps_everything_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the secrets that it finds in its environment."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", key := "d5" * 20)
    monkeypatch.setenv("HF_TOKEN", token := "hf_of-the-user-of-a-run")
    run = config(tmp_path, wandb=True)
    write(run, 1)
    (kept,) = (tmp_path / "r" / "wandb").glob("offline-run-*/run-*.wandb")
    assert kept.name == f"run-{(tmp_path / 'r' / RUN_ID).read_text().strip()}.wandb"
    assert b"critic/score/mean" in kept.read_bytes()
    (table,) = kept.parent.rglob("completions*.table.json")
    assert json.loads(table.read_text())["columns"] == list(COLUMNS)
    assert files_with(["r"], tmp_path), "it looks into them"
    assert files_with([key, token], tmp_path) == []


def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = config(tmp_path, mlflow=True, project="sums")
    write(run, 1, 2)
    write(run, 2, 3)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert kept.data.params["model.path"] == "m"
    assert kept.info.status == "FINISHED"
    curve = client.get_metric_history(kept.info.run_id, "critic.score.mean")
    assert [(point.step, point.value) for point in curve] == [(1, 0.5), (2, 0.5), (2, 0.5), (3, 0.5)]
    assert kept.data.metrics["dropped.user_s reason_"] == 1
    shown = json.loads(kept.data.tags["mlflow.loggedArtifacts"])
    assert [one["path"] for one in shown] == [f"completions/step-0000000{step}.json" for step in (1, 2, 3)]
    table = tmp_path / "mlruns" / kept.info.experiment_id / kept.info.run_id / "artifacts" / "completions"
    assert sorted(path.name for path in table.iterdir()) == [f"step-0000000{step}.json" for step in (1, 2, 3)]
    assert json.loads((table / "step-00000003.json").read_text())["data"][0][3] == "<b>4</b>"


def test_mlflow_fills_a_run_that_it_has_made_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri, values = (tmp_path / "mlruns").as_uri(), {f"key{number}": number for number in range(150)}

    def open_tracker(config: dict[str, Any]) -> None:
        MlflowTracker(uri, "sums", name="r", run_id="r-1", config=config).close()

    log_batch, calls = mlflow.MlflowClient.log_batch, []

    def fail_second(*arguments: Any, **named: Any) -> Any:
        calls.append(named)
        if len(calls) == 2:
            raise OSError("the server is gone")
        return log_batch(*arguments, **named)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail_second)
    with pytest.raises(OSError, match="gone"):
        open_tracker(values)
    open_tracker(values)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (kept,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert kept.data.params == {key: str(value) for key, value in values.items()}
    open_tracker({"key0": 7, "new": "x"})
    (kept,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (kept.data.params["key0"], kept.data.params["new"]) == ("0", "x"), "MLflow's parameters do not change"


def test_trackio_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    run = config(tmp_path, trackio=True, project="sums")
    write(run, 1, 2)
    write(run, 3)
    (name,) = SQLiteStorage.get_runs("sums")
    assert name == take_run_id(tmp_path / "r", "r")
    logs = SQLiteStorage.get_logs("sums", name)
    assert {log["step"] for log in logs} == {1, 2, 3}
    assert any(log.get("critic/score/mean") == 0.5 for log in logs)
    assert any("completions" in log for log in logs)


@pytest.mark.parametrize("key", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_package_that_is_missing_is_named(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=rf"logging\.{key}.*rollmesh\[{key}\]"):
        check_trackers(config(tmp_path, **{key: True}))


def test_two_runs_of_one_name_are_two(tmp_path: Path) -> None:
    ids = {take_run_id(tmp_path / folder, "r") for folder in ("a", "b", "a")}
    assert len(ids) == 2
    assert all(one.startswith("r-") for one in ids)
