"""The model, the settings and the folder of an evaluation, before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmesh.evaluation.compared import compare_all
from rollmesh.evaluation.identity import IDENTITY, claim_folder, identity_of
from rollmesh.evaluation.model_choice import ModelChoice, choose_model
from rollmesh.evaluation.settings import WITHOUT_REWARDS, evaluation_config, read_for_evaluation
from rollmesh.learner.evaluation.measurement_identity import measurement
from rollmesh.learner.evaluation.result_log import ResultLog
from rollmesh.learner.standalone.response_file import RESPONSES
from rollmesh.mesh.config import Config, load_config, save_config
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.trainers import read_trainer_config
from tests.rollmesh.evaluation.records import record


def read(*overrides: str, **values: Any) -> Config:
    return read_for_evaluation({"model": {"path": "m"}, "data": {"eval": "held.jsonl"}, **values}, overrides, {})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints and two rounds."""
    folder = tmp_path / "runs" / "mine"
    for name in ("i0001-v00000002", "i0001-v00000004"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "state.json").write_text("{}")
    config = read("learner.lora.rank=4", "model.path=base", run={"dir": str(tmp_path / "runs"), "name": "mine"})
    save_config(config, folder / "config.yaml")
    for version in (2, 4):
        entry = {"incarnation": 1, "version": version, "measurement": measurement(config)}
        ResultLog(folder).write(entry, [record(row, [float(row < version)]) for row in range(5)])
    return folder


def test_a_configuration_needs_prompts_and_a_model_but_no_training_data() -> None:
    assert [source.path for source in read("eval.n=4").data.train] == ["held.jsonl"]
    both = read(data={"eval": "held.jsonl", "train": "t.jsonl"}).data
    assert [source.path for source in (*both.train, *(both.eval or ()))] == ["t.jsonl", "held.jsonl"]
    with pytest.raises(ConfigError, match="no prompts are given"):
        read_for_evaluation({"model": {"path": "m"}}, [], {})
    with pytest.raises(ConfigError, match="no model is given"):
        read_for_evaluation(None, ["data.eval=e"], {})
    assert read_for_evaluation({"data": {"eval": "e"}}, [], {}, "named").model.path == "named"
    assert read_for_evaluation({"data": {"eval": "e"}, "model": {"path": "m"}}, [], {}, "named").model.path == "m"
    asked = read_for_evaluation(None, ["--data.eval=e"], {**WITHOUT_REWARDS, "model.path": "m"})
    assert (asked.reward.functions, asked.reward.in_process) == (["none"], True)


def test_all_that_trains_is_left_out(tmp_path: Path) -> None:
    config = read(
        "placement.mode=collocated",
        "learner.device=cuda",
        "algorithm=dapo",
        "rollout.n=1",
        "buffer.min_members=1",
        "buffer.redis=redis://there:1",
        "eval.n=8",
        "rollout.max_response_tokens=77",
        "logging.wandb=true",
    )
    choice = ModelChoice("x", config.model, tmp_path, load_config(config.model_dump()).learner.lora)
    made = evaluation_config(config, choice, tmp_path / "out")
    assert made.run.folder == tmp_path / "out"
    assert (made.placement.mode, made.learner.device, made.buffer.redis) == ("split", "cpu", None)
    assert (made.eval, made.rollout) == (config.eval, config.rollout)
    assert not made.logging.wandb
    with pytest.raises(ConfigError, match=r"run\.name"):
        evaluation_config(config, choice, tmp_path / "no name")


def test_a_model_is_a_folder_a_run_a_checkpoint_or_an_adapter(run: Path, tmp_path: Path) -> None:
    config = read()
    latest = run / "checkpoints" / "i0001-v00000004"
    assert choose_model(config, None) == ModelChoice("m", config.model)
    assert choose_model(config, "org/name").base.path == "org/name"
    chosen = choose_model(config, str(run))
    assert (chosen.name, chosen.base.path, chosen.weights) == ("mine-i0001-v00000004", "base", latest.absolute())
    assert chosen.lora is not None
    assert chosen.lora.rank == 4
    assert replace(choose_model(config, str(latest)), reason=chosen.reason) == chosen
    assert chosen.reason == "the latest of the run"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4, "base_model_name_or_path": "org/base"}')
    chosen = choose_model(config, str(adapter))
    assert (chosen.base.path, chosen.weights, chosen.lora) == ("org/base", adapter, None)
    left = run / "hf" / "last"
    left.mkdir(parents=True)
    assert choose_model(config, str(left)).name == "mine-last"
    for missing, hint in (
        (run / "checkpoints" / "nope", "i0001-v00000002, i0001-v00000004"),
        (tmp_path / "nope", "folder of a model, run, checkpoint or adapter"),
    ):
        with pytest.raises(DataError, match="does not exist") as refused:
            choose_model(config, str(missing))
        assert hint in str(refused.value)
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "state.json").unlink()
        checkpoint.rmdir()
    with pytest.raises(DataError, match="has no checkpoint yet"):
        choose_model(config, str(run))


def test_the_folder_of_a_training_is_one_of_a_run(run: Path) -> None:
    """Its kind is in the folder: a configuration of `rollmesh run` has other keys."""
    given = {"model": {"path": "base"}, "data": {"train": "rows", "max_tokens": 99}, "learner": {"lora": {"rank": 2}}}
    for command in ("sft", "dpo"):
        (run / "command").write_text(f"{command}\n")
        save_config(read_trainer_config(command, given), run / "config.yaml")
        for path in (run, run / "checkpoints" / "i0001-v00000004"):
            chosen = choose_model(read(), str(path))
            assert (chosen.name, chosen.base.path) == ("mine-i0001-v00000004", "base")
            assert chosen.lora is not None
            assert chosen.lora.rank == 2
    (run / "command").write_text("rm\n")
    save_config(read_trainer_config("rm", given), run / "config.yaml")
    with pytest.raises(DataError, match="has a reward model, which answers nothing"):
        choose_model(read(), str(run))


def test_a_folder_is_continued_with_the_same_measurement_alone(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text("{}")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    values = {"model": {"path": str(tmp_path / "m")}, "data": {"eval": str(tmp_path / "held.jsonl")}}
    out = tmp_path / "out"

    def claim(*overrides: str, with_log_probs: bool = False) -> None:
        config = read_for_evaluation(values, overrides, {})
        claim_folder(out, identity_of(config, ModelChoice("m", config.model), with_log_probs=with_log_probs))

    claim()
    for free in ("eval.rows=3", "eval.right_at=0.5", "rollout.replicas=2"):
        claim(free)
    for other in ("eval.n=2", "rollout.max_response_tokens=9", "reward.functions=[qa]"):
        with pytest.raises(ConfigError, match=rf"differs in {other.partition('=')[0]}"):
            claim(other)
    with pytest.raises(ConfigError, match="differs in --log-probs"):
        claim(with_log_probs=True)
    (tmp_path / "m" / "config.json").write_text('{"x": 1}')
    with pytest.raises(ConfigError, match=r"differs in model \(base\)"):
        claim()


def test_runs_and_evaluations_are_compared_over_the_same_rows(run: Path, tmp_path: Path) -> None:
    found = compare_all([f"{run}@2", str(run)])
    assert [one.name for one in found.measured] == ["mine@1:2", "mine@1:4"], "the newest, where none is the best"
    (mean, *_) = found.pairs[0]
    assert (mean.baseline, mean.other, mean.wins, mean.ties) == (0.4, 0.8, 2, 3)
    assert json.loads(json.dumps(found.to_json()))["pairs"]["mine@1:4"][0]["verdict"] == "not decided"
    assert found.runs == [], "one run against itself"

    out = tmp_path / "out"
    out.mkdir()
    identity = {"name": "m", "data": "held.jsonl", "measurement": dict(found.measured[0].measurement)}
    (out / IDENTITY).write_text(json.dumps(identity))
    (out / RESPONSES).write_text("".join(json.dumps(record(row, [1.0])) + "\n" for row in (0, 2, 7)))
    found = compare_all([str(run), str(out)])
    assert [one.name for one in found.measured] == ["mine@1:4", "out"]
    assert [one.name for one in compare_all([str(out), str(out)]).measured] == [str(out), str(out)]
    (mean, *_) = found.pairs[0]
    assert (mean.difference.prompts, mean.baseline, mean.other) == (2, 1.0, 1.0)
    with pytest.raises(DataError, match=r"version 9 of .* was not evaluated"):
        compare_all([f"{run}@9", str(run)])
    with pytest.raises(DataError, match="neither a run nor an evaluation"):
        compare_all([str(run), str(tmp_path)])
    with pytest.raises(ConfigError, match="nothing to compare with"):
        compare_all([str(run)])


@pytest.mark.parametrize(
    ("given", "prompt", "response"),
    [
        ({}, 128, 128),
        ({"max_response_tokens": 56}, 200, 56),
        ({"max_prompt_tokens": 100}, 100, 1024),
        ({"max_response_tokens": 300}, 1024, 300),
    ],
)
def test_defaults_of_lengths_leave_room_in_a_short_context(
    tmp_path: Path, given: dict[str, int], prompt: int, response: int
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 256}')
    config = read(*(f"rollout.{key}={value}" for key, value in given.items()), f"model.path={tmp_path}")
    made = evaluation_config(config, ModelChoice("x", config.model), tmp_path / "out").rollout
    assert (made.max_prompt_tokens, made.max_response_tokens) == (prompt, response)
