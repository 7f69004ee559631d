"""Keys of verl and TRL in a configuration are answered with ours, all at once."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.config.foreign.answers import answers, without
from rollmesh.mesh.config.foreign.tables import tables
from rollmesh.mesh.config.load import load_as
from rollmesh.mesh.config.trainers.configs import CONFIGS
from rollmesh.mesh.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}}


def said(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load_config(MINIMAL, overrides)
    assert "rollmesh init --from" in refused.value.hint
    return refused.value.message.splitlines()


def test_all_keys_are_answered_in_one_attempt_with_the_errors_of_the_rest() -> None:
    lines = said(
        "actor_rollout_ref.rollout.n=8",
        "trainer.total_epochs=15",
        "algorithm.adv_estimator=rloo",
        "num_generations=4",
        "trainer.of_tomorrow=1",
        "learner.stps=3",
    )
    assert lines[0] == "there are keys of verl and TRL:"
    assert set(lines[1:]) == {
        "  actor_rollout_ref.rollout.n=8 -> rollout.n=8",
        "  trainer.total_epochs=15 -> data.epochs=15",
        "  algorithm.adv_estimator=rloo -> algorithm: rloo",
        "  num_generations=4 -> rollout.n=4",
        "  nothing is known to stand for trainer.of_tomorrow",
        "unknown key learner.stps, did you mean learner.steps?",
    }


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("actor_rollout_ref.actor.use_kl_loss=True", "=true -> algorithm.kl.where=loss"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "=64 -> learner.batch.minibatches: a number of parts"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "algorithm.aggregation=seq_mean_token_mean"),
        ("algorithm.norm_adv_by_std_in_grpo=True", "-> nothing to set"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "-> algorithm.advantage.normalize_by_std=false"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=True", "learner.roles.reference.parallel"),
        ("scale_rewards=batch", "algorithm.advantage={name: grpo, std: batch}"),
        ("loss_type=of_tomorrow", "-> nothing stands for this value"),
    ],
)
def test_the_value_decides_where_the_table_has_values(override: str, answer: str) -> None:
    assert answer in said(override)[1]


def test_a_text_is_not_repeated_since_it_may_be_a_misplaced_secret() -> None:
    assert said("trainer.experiment_name=hunter2") == [
        "there are keys of verl:",
        "  trainer.experiment_name -> run.name",
    ]


def test_our_own_keys_are_no_answers_and_stay() -> None:
    values = {**MINIMAL, "data": {"train": "t", "train_files": "x"}, "trainer": {"save_freq": 5, "nnodes": 1}}
    found = answers(values, Config.model_fields)
    assert [answer.key for answer in found] == ["data.train_files", "trainer.save_freq", "trainer.nnodes"]
    assert without(values, found) == MINIMAL


@pytest.mark.parametrize("command", ["sft", "rm", "dpo"])
def test_keys_of_trainers_on_data_are_answered_as_those_of_their_commands(command: str) -> None:
    pasted = ("per_device_train_batch_size=4", "max_length=512", "num_train_epochs=3", "loss_type=ipo", "beta=0.2")
    with pytest.raises(ConfigError) as refused:
        load_as(CONFIGS[command], MINIMAL, [*pasted, "num_generations=4", "learner.stps=3"], command=command)
    lines = refused.value.message.splitlines()
    assert lines[0] == "there are keys of TRL:"
    assert lines[1].startswith("  per_device_train_batch_size=4 -> learner.batch.rows: their product times")
    assert lines[2:6] == [
        "  max_length=512 -> data.max_tokens=512",
        "  num_train_epochs=3 -> data.epochs=3",
        "  loss_type=ipo -> loss.name=ipo",
        "  beta=0.2 -> loss.beta=0.2",
    ]
    assert "unknown key learner.stps, did you mean learner.steps?" in lines[6]
    assert "unknown key num_generations" in lines[6]


def test_a_row_that_takes_values_over_has_a_key_for_each_of_theirs() -> None:
    rows = [row for table in (*tables("run"), *tables("trainer")) for row in table.rows]
    assert len(rows) > 150
    assert not [row for row in rows if row.same and None in map(row.part, range(len(row.theirs)))]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+learner.steps=5", "Hydra's + is not needed, write learner.steps=5"),
        ("~data.eval", "data.eval=null unsets"),
        ("--learner.steps", "write --learner.steps=VALUE or --learner.steps VALUE"),
    ],
)
def test_forms_of_other_programs_are_answered(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match="override") as refused:
        load_config(MINIMAL, [override, "nonsense"])
    assert words in refused.value.message
    assert "'nonsense' has not the form --section.key=value" in refused.value.message


def test_missing_sections_name_the_keys_that_they_need() -> None:
    with pytest.raises(ConfigError, match=r"^missing key model\.path; missing key data\.train \("):
        load_config({})
