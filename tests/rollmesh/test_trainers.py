"""The trainers' commands: configurations, the run folder, and the Python API."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from rollmesh import trainers
from rollmesh.evaluation.runs import run_outcome
from rollmesh.launcher.folder import locked
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.trainers.record import write_record
from rollmesh.mesh.config import load_config, save_config
from rollmesh.mesh.config.trainers.configs import CONFIGS
from rollmesh.mesh.errors import ConfigError, DataError, RunBusyError
from rollmesh.run_files import read_any_config
from rollmesh.run_handle import Run
from rollmesh.trainers import INTERRUPTED, read_trainer_config, run_here, sft
from tests import fork_server
from tests.command import Command
from tests.learner.trainers.tiny import Stops, write_chat_model, write_rows
from tests.report_page import read_charts, read_panels
from tests.signals import handled

HEARD = """
import rollmesh

class Heard(rollmesh.Callback):
    def _write(self, run, event):
        name = type(event).__name__ + (f":{event.reason}" if hasattr(event, "reason") else "")
        with (run.folder / "heard").open("a") as file:
            file.write(name + "\\n")
        if getattr(event, "step", 0) == 2:
            run.stop()

    on_run_start = on_step_end = on_evaluation_end = on_checkpoint_committed = on_run_end = _write
"""
GIVEN = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}}


@pytest.mark.parametrize("command", CONFIGS)
def test_unknown_keys_are_refused_with_the_nearest_name(command: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown key learner\.steps_, did you mean learner\.steps\?") as caught:
        read_trainer_config(command, GIVEN, ["--learner.steps_=3"])
    assert caught.value.hint == f"`rollmesh config schema {command}` lists every key"
    assert read_trainer_config(command, GIVEN, ["--learner.steps=3"]).learner.steps == 3


def test_settings_of_other_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match="settings of name: kto"):
        read_trainer_config("dpo", GIVEN, ["loss.desirable_weight=2"])
    with pytest.raises(ConfigError, match="needs pairs"):
        read_trainer_config("dpo", GIVEN, ["loss.name=kto", "loss.sft_weight=1"])


@pytest.mark.parametrize("command", CONFIGS)
def test_logins_are_refused_as_in_a_run(command: str) -> None:
    with pytest.raises(ConfigError, match=r"logging\.mlflow_uri holds a URL with a login") as caught:
        read_trainer_config(command, GIVEN, ["logging.mlflow_uri=https://user:pw@host"])
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("command", CONFIGS)
def test_experts_are_replayed_by_no_trainer(command: str) -> None:
    with pytest.raises(ConfigError, match="needs generators"):
        read_trainer_config(command, GIVEN, ["learner.router.replay=true"])


def test_parts_are_frozen_where_that_says_something() -> None:
    frozen = "learner.frozen=[vision_tower]"
    assert read_trainer_config("sft", GIVEN, [frozen]).learner.frozen == ["vision_tower"]
    with pytest.raises(ConfigError, match="frozen: engine megatron trains all parts"):
        read_trainer_config("sft", GIVEN, [frozen, "learner.engine=megatron"])
    with pytest.raises(ConfigError, match="frozen: with lora nothing but the adapter is trained"):
        read_trainer_config("sft", GIVEN, [frozen, "learner.lora={}"])


@pytest.mark.parametrize("command", CONFIGS)
def test_an_edited_held_out_file_is_told(command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("{}\n")
    values = {**GIVEN, "data": {"train": "d.jsonl", "eval": str(held_out)}, "run": {"dir": str(tmp_path)}}
    config = read_trainer_config(command, values)
    config.run.folder.mkdir()
    write_record(command, config)
    trainers._report_changes(command, config)
    assert not caplog.messages
    held_out.write_text("{ }\n")
    trainers._report_changes(command, read_trainer_config(command, values, ["eval.rows=5"]))
    assert caplog.messages == [f"changed since the last launch: eval.rows none -> 5; {held_out} (edited)"]


def test_a_command_lists_its_keys(rollmesh: Command) -> None:
    assert "loss.beta = 0.1" in rollmesh("config", "schema", "dpo").stdout
    assert "data.train_on = all" in rollmesh("config", "schema", "sft").stdout
    refused = rollmesh("config", "schema", "run")
    assert refused.returncode == ConfigError.exit_code
    assert "known: sft, rm, dpo" in refused.stderr


def test_one_training_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    config = read_trainer_config("sft", GIVEN, [f"run.dir={tmp_path}"])
    with locked(tmp_path / "run"):
        assert run_here("sft", config) == RunBusyError.exit_code


def test_no_training_begins_in_the_folder_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = read_trainer_config("sft", GIVEN, [f"run.dir={tmp_path}"])
    (tmp_path / "run").mkdir()
    save_config(load_config(GIVEN), tmp_path / "run" / "config.yaml")
    assert run_here("sft", config) == ConfigError.exit_code
    assert "is the folder of a `rollmesh run`" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "run").glob("*.yaml")] == ["config.yaml"]


def test_settings_that_contradict_each_other_are_refused() -> None:
    several = "data.train=[{path: a.jsonl, weight: 1}, {path: b.jsonl}]"
    for overrides, words in (
        ([several], "give every source a weight, or none of them"),
        (["data.train=[a.jsonl, b.jsonl]", "data.curriculum=plan.py:f"], "data.curriculum has no end of its own"),
        (["checkpoint.hf=[best]"], "checkpoint.hf: best needs data.eval and checkpoint.best"),
        (["data.train={path: a.jsonl, sampling: {n: 2}}"], "a.jsonl has sampling, and nothing is sampled"),
        (["data.train={path: a.jsonl, ground_truth_key: x}"], "a.jsonl has ground_truth_key"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_trainer_config("sft", GIVEN, overrides)


def test_a_loss_is_better_where_it_is_less() -> None:
    for given, expected in (
        ([], "min"),
        (["eval.metric=loss/chats"], "min"),
        (["eval.metric=rewards/accuracies"], "max"),
        (["eval.metric=entropy", "eval.direction=min"], "min"),
    ):
        assert read_trainer_config("dpo", GIVEN, given).eval.better == expected


def test_a_training_that_is_asked_to_end_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "run": {"dir": str(tmp_path)},
        "model": {"path": str(write_chat_model(tmp_path / "model"))},
        "data": {"train": str(write_rows(tmp_path)["rm"])},
        "learner": {"steps": 3},
    }
    monkeypatch.setattr(trainers, "ControlRequests", lambda: Stops(2))
    assert run_here("dpo", read_trainer_config("dpo", given)) == INTERRUPTED
    # A rank next to it must not end the program with that.
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_here("dpo", read_trainer_config("dpo", given), fresh=True) == 0
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(trainers, "ControlRequests", ControlRequests)
    assert run_here("dpo", read_trainer_config("dpo", given, ["loss.beta=0.5"])) == 0
    assert "changed since the last launch: loss.beta 0.1 -> 0.5" in capsys.readouterr().err
    ended = (tmp_path / "run" / "summary.json").read_text()
    assert run_here("dpo", read_trainer_config("dpo", given, ["run.seed=9"])) == ConfigError.exit_code
    assert (tmp_path / "run" / "summary.json").read_text() == ended, "a refused attempt has changed nothing"


def test_an_interrupt_ends_the_command_in_order(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    code = "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); "
    code += f"open({str(ready)!r}, 'w').close(); signal.pause()"

    def interrupt() -> None:
        ready.read_text()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with handled(signal.SIGINT, signal.default_int_handler):
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            trainers._status_of([sys.executable, "-c", code])
        thread.join()


def test_the_commands_of_a_run_read_a_training(
    tmp_path: Path, rollmesh: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One training in a process of its own, from rows in memory, and what each command says of its folder."""
    # That it is executed and interrupted is seen above.
    monkeypatch.setattr(
        trainers, "_status_of", lambda command: fork_server.popen(command[len(fork_server.CLI) :]).wait()
    )
    rows = [json.loads(line) for line in write_rows(tmp_path)["sft"].read_text().splitlines()]
    (tmp_path / "heard.py").write_text(HEARD)
    given = {
        "run": {"dir": str(tmp_path / "runs")},
        "model": {"path": str(write_chat_model(tmp_path / "model"))},
        "data": {"train": "replaced"},
        "eval": {"every_steps": 1},
        "logging": {"callbacks": [f"{tmp_path / 'heard.py'}:Heard"]},
    }
    folder = sft(given, train=rows[:20], eval=rows[20:], overrides=["learner.steps=1000"])
    run = tmp_path / "runs" / "run"
    assert folder == run / "hf" / "last"
    assert (folder / "model.safetensors").is_file()
    heard = (run / "heard").read_text().split()
    assert heard[:3] == ["RunStart", "StepEnd", "EvaluationEnd"]
    assert "CommittedCheckpoint" in heard, "it may come after later steps, which do not wait for the disk"
    assert heard[-1] == "RunEnd:request", "the callback has asked for the end after two steps"
    steps = heard.count("StepEnd")
    assert 2 <= steps < 1000
    assert sorted(path.name for path in (tmp_path / "runs" / "rows").iterdir()) == sorted(
        Path(source.path).name for source in (*read_any_config(run).data.train, *(read_any_config(run).data.eval or ()))
    )
    for command, words in (
        ("status", f"sft: finished\nstep {steps} of 1000"),
        ("report", "report.html"),
        ("evals", "best by loss"),
    ):
        assert words in rollmesh(command, str(run)).stdout, command
    assert {"loss", "lr", "throughput"} <= read_charts(run / "report.html")
    assert "pushes" not in read_panels(run / "report.html")
    refused = rollmesh("samples", str(run))
    assert refused.returncode == DataError.exit_code
    assert "is of `rollmesh sft`, which trains on data and samples nothing" in refused.stderr
    handle = Run(run)
    assert [record["step"] for record in handle.metrics()] == list(range(1, steps + 1))
    assert handle.summary().steps == steps
    assert [checkpoint.is_best for checkpoint in handle.checkpoints()][-1]
    assert (handle.export(tmp_path / "exported", "best") / "model.safetensors").is_file()
    assert run_outcome(run)["held-out loss, last"] == handle.metrics()[-1]["eval/loss"]
