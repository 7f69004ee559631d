"""A training continues as the one that was begun, or is refused by the names of what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.learner.checkpoint.compatibility import trained_form
from rollmesh.learner.trainers.beginning import Beginning
from rollmesh.learner.trainers.identity import KEY, check_identity, identity_of
from rollmesh.mesh.config.trainers.configs import CONFIGS
from rollmesh.mesh.errors import ConfigError
from rollmesh.trainers import read_trainer_config


def identity(folder: Path, *overrides: str) -> dict[str, str]:
    given = {"model": {"path": str(folder)}, "data": {"train": str(folder / "rows.jsonl")}}
    return identity_of("sft", read_trainer_config("sft", given, overrides))


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ("{rank: 4}", "{rank: 8}", "learner.lora.rank"),
        ("{rank: 4}", "{rank: 4, alpha: 8}", "learner.lora.alpha"),
        ("{rank: 4}", "{rank: 4, rank_stabilized: true}", "learner.lora.rank_stabilized"),
        ("{targets: [q_proj]}", "{targets: [q_proj, v_proj]}", "learner.lora.targets"),
        ("{rank: 4}", "null", "learner.lora"),
        ("null", "{rank: 4}", "learner.lora"),
    ],
)
def test_another_adapter_is_refused(tmp_path: Path, before: str, now: str, named: str) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    begun = identity(tmp_path, f"learner.lora={before}")
    with pytest.raises(ConfigError) as caught:
        check_identity(tmp_path, begun, identity(tmp_path, f"learner.lora={now}"))
    assert caught.value.message.endswith(f"begun with something else: {named}")
    check_identity(tmp_path, begun, identity(tmp_path, f"learner.lora={before}"))


@pytest.mark.parametrize("command", CONFIGS)
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.optimizer.name=muon", "optimizer of actor has name: muon, .* was written with adamw"),
        ("learner.optimizer.state_dtype=8bit", "has state_dtype: 8bit, .* was written with float32"),
        ("learner.frozen=[lm_head]", r"learner\.frozen is lm_head, .* was written with nothing"),
    ],
)
def test_every_trainer_refuses_what_its_checkpoint_cannot_follow(
    tmp_path: Path, command: str, override: str, words: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    given = {
        "run": {"dir": str(tmp_path)},
        "model": {"path": str(tmp_path)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
    }
    config = read_trainer_config(command, given)
    checkpoint = config.run.folder / "checkpoints" / "i0001-v00000003"
    checkpoint.mkdir(parents=True)
    extra = {KEY: identity_of(command, config), **trained_form(config.learner)}
    (checkpoint / "state.json").write_text(json.dumps({"extra": extra}))
    assert Beginning.find(command, config).checkpoint == checkpoint.name
    assert Beginning.find(command, read_trainer_config(command, given, ["learner.optimizer.lr=1"])).checkpoint
    with pytest.raises(ConfigError, match=words):
        Beginning.find(command, read_trainer_config(command, given, [override]))


def test_the_first_values_of_an_adapter_may_have_been_removed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    begun = identity(tmp_path, f"learner.lora={{start_from: {tmp_path}}}")
    check_identity(tmp_path, begun, identity(tmp_path, "learner.lora={}"))
