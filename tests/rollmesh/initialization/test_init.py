"""`rollmesh init`: what it writes is accepted by a run, for several kinds of models and data."""

from __future__ import annotations

import json
import os
import pty
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.chats import chat_tokenizer
from examples.demo.model import write_model
from rollmesh.initialization.inputs import DataLook, MachineLook, ModelLook
from rollmesh.initialization.proposal import Setting, Wishes, propose
from rollmesh.initialization.translation import translate
from rollmesh.initialization.writing import to_yaml
from rollmesh.launcher.preflight import checks
from rollmesh.launcher.preflight.checks import check_files
from rollmesh.learner.coordinator.prompt_sources import open_prompts
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.tokenizer_files import load_tokenizer
from rollmesh.reward_service.configured import BUILDERS
from tests.command import Command

CHAT = [{"role": "user", "content": "1+1="}]
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Kind of rows -> a row, and what the configuration says of it.
    "verl": (
        {"prompt": CHAT, "data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "2"}},
        {"train": "rows.jsonl", "functions": ["auto"]},
    ),
    "verl, unknown source": (
        {"prompt": "1+1=", "data_source": "mine", "reward_model": {"ground_truth": "2"}},
        {"train": "rows.jsonl", "functions": ["exact_match"]},
    ),
    "TRL": ({"prompt": CHAT, "solution": "2"}, {"train": "rows.jsonl", "functions": ["exact_match"]}),
    "TRL, JSON texts": (
        {"prompt": json.dumps([{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]), "solution": "2"},
        {"train": "rows.jsonl", "functions": ["exact_match"]},
    ),
    "TRL by other names": (
        {"question": "1+1=", "target": "2"},
        {"train": [{"path": "rows.jsonl", "ground_truth_key": "target"}], "prompt_key": "question"},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 0, chat_tokenizer("0123456789+= "))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "_REWARD_S", 600.0)
    monkeypatch.setattr(checks, "_LEARNER_S", 600.0)


def write_rows(row: dict[str, Any], name: str = "rows.jsonl") -> None:
    Path(name).write_text((json.dumps(row) + "\n") * 40)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_is_a_run_of_these_rows(rollmesh: Command, model: Path, kind: str) -> None:
    row, expected = KINDS[kind]
    write_rows(row)
    written = rollmesh("init", "--model", str(model), "--data", "rows.jsonl", "--out", "cfg.yaml")
    assert written.returncode == 0, written.stderr
    assert max(map(len, Path("cfg.yaml").read_text().replace(str(model), "M").splitlines())) <= 100
    config = load_config(Path("cfg.yaml"))
    found = {**config.model_dump(mode="json")["data"], "functions": config.reward.functions}
    assert {key: found[key] for key in expected} == expected
    assert config.rollout.context_tokens <= 128
    check_files(config)
    others = config.reward.model_copy(update={"functions": list(BUILDERS)})
    check_files(config.model_copy(update={"reward": others}))
    prompts, _ = open_prompts(config, load_tokenizer(model), greedy=0)
    assert prompts is not None


def test_a_dry_run_accepts_it_with_a_reward_of_ones_own(rollmesh: Command, model: Path) -> None:
    write_rows({"prompt": "1+1="})
    refused = rollmesh("init", "--model", str(model), "--data", "rows.jsonl")
    assert refused.returncode == ConfigError.exit_code
    assert "no ground truth" in refused.stderr
    assert "--reward FILE.py:FUNCTION" in refused.stderr
    Path("mine.py").write_text("def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    given = ("init", "--model", str(model), "--data", "rows.jsonl", "--reward", "mine.py:score", "--name", "own")
    assert rollmesh(*given).returncode == 0
    dry = rollmesh("run", "cfg.yaml", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "run own would start in runs/own" in dry.stdout
    again = rollmesh(*given)
    assert again.returncode == ConfigError.exit_code
    assert "cfg.yaml is there already" in again.stderr


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "1+1="}, "no field looks like a prompt (there are: text)"),
        ({"prompt": CHAT, "answer": "2"}, "has no chat template"),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": "2"}]},
            "ends with an answer, as rows of `rollmesh sft`",
        ),
        ({"prompt": None, "answer": "2"}, "row 0: field `prompt` is missing"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    rollmesh: Command, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    write_rows(row)
    write_model(tmp_path / "plain", 0)
    refused = rollmesh("init", "--model", "plain", "--data", "rows.jsonl")
    assert refused.returncode == DataError.exit_code
    assert message in refused.stderr
    assert not Path("cfg.yaml").exists()


def test_without_a_terminal_what_is_missing_is_named(rollmesh: Command) -> None:
    refused = rollmesh("init", "--data", "rows.jsonl")
    assert refused.returncode == ConfigError.exit_code
    assert "--model is missing" in refused.stderr


def test_devices_decide_on_placement_and_type() -> None:
    data = DataLook("t.parquet", "prompt", None, True, False, ("openai/gsm8k",), 100, 1000)

    def proposed(devices: int, parameters: int | None = None) -> dict[str, Any]:
        found = propose(
            ModelLook("m", 4096, parameters), data, MachineLook(16, devices), Wishes("n"), lambda _name: True
        )
        assert load_config(yaml.safe_load(to_yaml(found, [])))
        return {setting.key: setting.value for setting in found}

    none, one, eight = proposed(0), proposed(1), proposed(8, 500_000)
    assert "placement" not in none
    assert "model.dtype" not in none
    assert (one["placement"], one["model.dtype"], one["rollout.replicas"]) == ("collocated", "bfloat16", 1)
    assert (eight["learner.ranks"], eight["rollout.replicas"]) == (4, 4)
    assert one["learner.optimizer.lr"] < eight["learner.optimizer.lr"]
    assert one["rollout.max_prompt_tokens"] == 128


VERL = {
    "data": {"train_files": "rows.jsonl", "max_prompt_length": 16, "max_response_length": 8, "train_batch_size": 32},
    "algorithm": {"adv_estimator": "grpo", "gamma": 1.0, "use_kl_in_reward": False},
    "actor_rollout_ref": {
        "actor": {
            "ppo_mini_batch_size": 8,
            "clip_ratio": 0.2,
            "clip_ratio_high": 0.28,
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "optim": {"lr": 1e-4, "lr_warmup_steps": -1},
        },
        "rollout": {"n": 4, "name": "hf"},
    },
    "trainer": {
        "critic_warmup": 0,
        "total_epochs": 3,
        "experiment_name": "theirs",
        "logger": ["console", "wandb"],
        "of_tomorrow": 1,
    },
    "custom_reward_function": {"path": "mine.py", "name": "score", "reward_kwargs": {"mode": "a", "scale": 0.5}},
}


def test_a_configuration_of_verl_is_taken_over_and_what_is_not_is_noted(rollmesh: Command, model: Path) -> None:
    write_rows({"prompt": "1+1=", "data_source": "mine", "reward_model": {"ground_truth": "2"}})
    Path("verl.yaml").write_text(yaml.safe_dump(VERL))
    written = rollmesh("init", "--from", "verl.yaml", "--model", str(model))
    assert written.returncode == 0, written.stderr
    assert "3 notes at the end of cfg.yaml" in written.stdout
    config = load_config(Path("cfg.yaml"))
    assert (config.run.name, config.learner.batch.groups, config.learner.batch.minibatches) == ("theirs", 32, 4)
    assert config.learner.steps == 4, "3 passes over 40 rows, 32 a step"
    assert config.algorithm.params["loss"] == {"clip_low": 0.2, "clip_high": 0.28}
    assert config.algorithm.params["kl"] == {"where": "loss", "coefficient": 0.001}
    assert config.reward.functions == ["mine.py:score(mode='a', scale=0.5)"]
    assert config.logging.wandb
    assert config.model.path == str(model)
    notes = " ".join(Path("cfg.yaml").read_text().replace("# ", "").split())
    assert "Not taken over: algorithm.gamma: algorithm.advantage.gamma" in notes
    assert "Not taken over: actor_rollout_ref.actor.optim.lr_warmup_steps" in notes
    assert "Nothing is known to stand for trainer.of_tomorrow." in notes
    assert "use_kl_in_reward" not in notes, "it is off there, and here"
    assert "critic_warmup" not in notes, "there is no critic, nor a warm-up"


def test_arguments_of_trl_are_taken_over() -> None:
    arguments = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "beta": 0.04,
        "loss_type": "dapo",
        "bf16": True,
        "learning_rate": 1e-6,
    }
    settings, notes = translate(arguments)
    assert {setting.key: setting.value for setting in settings} == {
        "algorithm": "bnpo",
        "learner.batch.groups": 8,
        "algorithm.kl.where": "loss",
        "algorithm.kl.coefficient": 0.04,
        "model.dtype": "bfloat16",
        "rollout.n": 4,
        "learner.optimizer.lr": 1e-6,
    }
    assert notes == []


def test_rewards_of_later_versions_of_verl_are_taken_over() -> None:
    theirs = {
        "reward": {
            "custom_reward_function": {"path": "mine.py", "name": "score"},
            "reward_manager": {"name": "dapo"},
            "reward_kwargs": {"overlong_buffer_cfg": {"len": 512, "penalty_factor": 1.0}, "max_resp_len": 4096},
        }
    }
    settings, notes = translate({"algorithm": {"adv_estimator": "grpo"}, **theirs})
    taken = {setting.key: setting.value for setting in settings}
    assert taken["reward.functions"] == ["mine.py:score"]
    assert (taken["algorithm.reward.overlong_buffer_tokens"], taken["algorithm.reward.overlong_factor"]) == (512, 1.0)
    assert [note.split(";")[0] for note in notes] == [
        "Not taken over: reward.reward_manager.name",
        "Not taken over: reward.reward_kwargs.max_resp_len",
    ]


def test_sections_stand_together_and_a_name_alone_becomes_a_section() -> None:
    text = to_yaml(
        [Setting("algorithm", "grpo", "Why."), Setting("algorithm.loss.clip_low", 0.1)], ["Head."], ["Note."]
    )
    assert yaml.safe_load(text) == {"algorithm": {"name": "grpo", "loss": {"clip_low": 0.1}}}
    assert text.startswith("# Head.\n")
    assert text.endswith("# Note.\n")
    assert set(yaml.safe_load(text)) <= set(Config.model_fields)


def test_at_a_terminal_it_asks_for_what_is_missing(
    model: Path, rollmesh: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(KINDS["verl"][0])
    leader, follower = pty.openpty()
    # A terminal keeps what is typed before it is asked for.
    os.write(leader, f"{model}\nrows.jsonl\n".encode())
    with open(follower) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        written = rollmesh("init")
    os.close(leader)
    assert written.returncode == 0, written.stderr
    first, second = written.stdout.index("model ("), written.stdout.index("training rows (")
    assert first < second < written.stdout.index("cfg.yaml is written")
    config = load_config(Path("cfg.yaml"))
    assert (config.model.path, config.data.train[0].path) == (str(model), "rows.jsonl")
