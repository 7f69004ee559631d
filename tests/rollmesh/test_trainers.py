"""The trainers' commands: configurations, the run folder, and the Python API."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.launcher.folder import locked
from rollmesh.mesh.config.trainers.configs import CONFIGS
from rollmesh.mesh.errors import ConfigError, RunBusyError
from rollmesh.trainers import read_trainer_config, run_here, sft
from tests.command import Command
from tests.learner.trainers.tiny import write_chat_model, write_rows

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


def test_the_api_trains_in_a_process_of_its_own(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    given = {
        "run": {"dir": str(tmp_path / "runs")},
        "model": {"path": str(write_chat_model(tmp_path / "model"))},
        "data": {"train": str(rows["sft"])},
    }
    folder = sft(given, overrides=["learner.steps=2"])
    assert folder == tmp_path / "runs" / "run" / "hf" / "last"
    assert (folder / "model.safetensors").is_file()
