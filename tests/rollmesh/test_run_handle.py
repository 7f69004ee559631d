"""A run by its folder. Its requests to a learner and its exports: `tests/integration/test_run.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.learner.checkpoint.names import checkpoint_name
from rollmesh.learner.recovery.run_id import take_run_id
from rollmesh.mesh.config import load_config, save_config
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.run_files import check_command
from rollmesh.run_handle import Run
from rollmesh.trainers import read_trainer_config
from rollmesh.training.summary import TrainingSummary, write_training_summary
from tests.command import Command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = load_config({"model": {"path": "m"}, "data": {"train": "t"}, "run": {"dir": str(tmp_path), "name": "r"}})
    run = config.run.folder
    run.mkdir()
    save_config(config, run / "config.yaml")
    lines = [
        {"step": step, "critic/score/mean": step / 10, "attempt": attempt} for attempt, step in enumerate([1, 2, 2, 3])
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [{"step": step, "reward": reward, "response": "a"} for step, reward in enumerate([0.5, 0.1, 0.9])]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    for version in (2, 3):
        (run / "checkpoints" / checkpoint_name(PolicyVersion(1, version))).mkdir(parents=True)
    return run


def test_results_are_read_from_the_folder(folder: Path) -> None:
    run = Run(str(folder))
    assert run.config.run.name == "r"
    assert [(record["step"], record["attempt"]) for record in run.metrics()] == [(1, 0), (2, 2), (3, 3)]
    assert [sample["reward"] for sample in run.samples(2)] == [0.9, 0.1]
    assert [sample["reward"] for sample in run.samples(1, worst=True)] == [0.1]
    assert [(found.version, found.is_best) for found in run.checkpoints()] == [(2, False), (3, False)]
    assert run.checkpoints()[0].folder == folder / "checkpoints" / run.checkpoints()[0].name
    with pytest.raises(DataError, match="has no id yet"):
        _ = run.run_id
    assert take_run_id(folder, "r") == run.run_id


def test_requests_need_a_run_in_progress(folder: Path) -> None:
    run = Run(folder)
    for request in (run.stop, run.request_checkpoint):
        with pytest.raises(DataError, match="is not in progress"):
            request()


def test_a_training_has_no_mesh_that_could_be_asked(folder: Path) -> None:
    (folder / "command").write_text("rm\n")
    save_config(read_trainer_config("rm", {"model": {"path": "m"}, "data": {"train": "t"}}), folder / "config.yaml")
    run = Run(folder)
    assert [found.version for found in run.checkpoints()] == [2, 3]
    assert isinstance(summary := run.summary(), TrainingSummary)
    assert summary.command == "rm"
    for request in (run.stop, run.request_checkpoint):
        with pytest.raises(DataError, match="is the folder of `rollmesh rm`, which has no mesh that could be asked"):
            request()


def test_the_summary_of_a_training_has_the_accuracy_of_its_pairs_and_its_checkpoint(folder: Path) -> None:
    records = [
        {"step": 1, "steps": 2, "actor/loss": 0.7, "rewards/accuracies": 0.5},
        {"step": 2, "steps": 2, "actor/loss": 0.6, "rewards/accuracies": 0.75, "eval/loss": 0.65}
        | {"eval/rewards/accuracies": 0.625},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "command").write_text("dpo\n")
    save_config(read_trainer_config("dpo", {"model": {"path": "m"}, "data": {"train": "t"}}), folder / "config.yaml")
    summary = write_training_summary(folder, "dpo", "finished", 0.0)
    assert (summary.accuracy_first, summary.accuracy_last) == (0.5, 0.75)
    assert summary["checkpoint"] == summary.checkpoint == str(Run(folder).checkpoints()[-1].folder)
    lines = list(summary.lines())
    assert "step 2 of 2, 0.00 epochs, loss 0.7000 -> 0.6000, accuracy 50.0% -> 75.0%" in lines
    assert "held-out loss 0.6500 -> 0.6500, accuracy 62.5% -> 62.5% (at step 2)" in lines
    assert Run(folder).summary().to_dict()["accuracy_last"] == 0.75


@pytest.mark.parametrize(
    "command", [("ledger",), ("yield",), ("resume",), ("weights", "verify"), ("replay",), ("samples",)], ids=" ".join
)
def test_what_a_training_has_not_is_said_by_every_command(
    folder: Path, rollmesh: Command, command: tuple[str, ...]
) -> None:
    (folder / "command").write_text("sft\n")
    save_config(read_trainer_config("sft", {"model": {"path": "m"}, "data": {"train": "t"}}), folder / "config.yaml")
    write_training_summary(folder, "sft", "finished", 0.0)
    refused = rollmesh(*command, str(folder))
    assert refused.returncode == DataError.exit_code
    assert "of `rollmesh sft`, which" in refused.stderr
    assert "hint: " in refused.stderr


@pytest.mark.parametrize("command", ["run", "sft", "dpo"])
def test_a_command_is_not_begun_in_the_folder_of_another_one(folder: Path, command: str) -> None:
    for begun in ("run", "sft", "dpo"):
        if begun != "run":
            (folder / "command").write_text(f"{begun}\n")
        if begun == command:
            check_command(folder, command)
            continue
        with pytest.raises(ConfigError, match=f"is the folder of a `rollmesh {begun}`"):
            check_command(folder, command)
    check_command(folder / "absent", command)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        Run(tmp_path)
