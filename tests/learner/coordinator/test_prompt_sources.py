"""The data of a configuration: training rows after a restart, and the sampling of each side's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.coordinator.prompt_sources import (
    check_training_prompts,
    open_held_out,
    open_prompts,
    open_training_prompts,
)
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import ConfigError, DataError
from tests.learner.data.conftest import record, tokenizer, write_jsonl  # noqa: F401 - a fixture

CURRICULUM = """
def curriculum(progress):
    return {"easy": 1.0} if progress.prompts < 64 else {"easy": 1.0, "hard": 3.0}
"""


def test_each_side_has_its_own_sampling(tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811 - the fixture
    train = write_jsonl(tmp_path / "train.jsonl", [record(index) for index in range(4)])
    held_out = write_jsonl(tmp_path / "eval.jsonl", [record(index) for index in range(3)])
    config = load_config(
        {
            "model": {"path": str(tmp_path)},
            "data": {"train": str(train), "eval": str(held_out)},
            "rollout": {"n": 4, "temperature": 0.9, "max_response_tokens": 7, "stop": ["x"]},
            "eval": {"n": 2, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "rows": 2},
        }
    )
    prompts, tasks = open_prompts(config, tokenizer, greedy=1)
    trained = prompts.after(0, 1).tasks[0]
    assert (trained.n, trained.greedy, trained.sampling.top_k) == (5, 1, 0)
    assert (round(trained.sampling.temperature, 6), trained.sampling.top_p) == (0.9, 1.0)
    assert tasks is not None
    assert len(tasks) == 2
    assert (tasks[0].n, tasks[0].greedy, tasks[0].sampling.top_k) == (2, 0, 20)
    assert [round(value, 6) for value in (tasks[0].sampling.temperature, tasks[0].sampling.top_p)] == [0.6, 0.95]
    for task in (trained, tasks[0]):
        assert (task.sampling.max_tokens, list(task.sampling.stop)) == (7, ["x"])
    assert len(open_held_out(config, tokenizer).source) == 3


def test_sources_have_sampling_of_their_own(tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811 - the fixture
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [record(index) for index in range(2)]) for name in ("own", "shared")
    ]
    own = {"temperature": 0.25, "max_response_tokens": 3}
    config = load_config(
        {
            "model": {"path": str(tmp_path)},
            "data": {
                "train": [{"path": str(paths[0]), "sampling": {**own, "n": 4}}, {"path": str(paths[1])}],
                "eval": [{"path": str(paths[0]), "sampling": {**own, "top_p": 0.5}}, {"path": str(paths[1])}],
                "epochs": 1,
            },
            "rollout": {"n": 2, "temperature": 1.0, "max_response_tokens": 7},
        }
    )
    prompts, held_out = open_prompts(config, tokenizer, greedy=0)
    trained = sorted(prompts.after(0, 4).tasks, key=lambda task: task.row)
    assert [(task.n, task.sampling.temperature, task.sampling.max_tokens) for task in trained] == [
        *[(4, 0.25, 3)] * 2,
        *[(2, 1.0, 7)] * 2,
    ]
    assert held_out is not None
    assert [(task.n, task.sampling.temperature, task.sampling.top_p) for task in held_out] == [
        *[(1, 0.25, 0.5)] * 2,
        *[(1, 0.0, 1.0)] * 2,
    ]
    assert config.group_sizes == (2, 4)
    assert len({task.sampling.seed for task in [*trained, *held_out]}) == 8


@pytest.mark.parametrize(
    ("key", "sampling", "words"),
    [
        ("train", {"temprature": 1}, r"the source easy: sampling\.temprature: .*sampling has temperature, top_p"),
        ("train", {"n": 0}, r"the source easy: sampling\.n: "),
        ("train", {"top_p": 0.5}, r"the source easy: sampling\.top_p and top_k are for held-out sources"),
        ("train", {"max_response_tokens": 9999}, r"the source easy: sampling\.max_response_tokens exceeds"),
        ("eval", {"n": 2}, r"data\.eval: the source easy: sampling\.n is for training sources"),
    ],
)
def test_sampling_that_cannot_be_names_its_source(key: str, sampling: dict[str, Any], words: str) -> None:
    data = {"train": "d.jsonl", key: [{"path": "e.jsonl", "name": "easy", "sampling": sampling}]}
    with pytest.raises(ConfigError, match=words):
        load_config({"model": {"path": "m"}, "data": data})


def test_every_source_has_its_share_of_a_few_held_out_rows(tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811 - as above
    train = write_jsonl(tmp_path / "train.jsonl", [record(0)])
    held_out = [
        str(write_jsonl(tmp_path / f"{name}.jsonl", [record(index, data_source=name) for index in range(4)]))
        for name in ("one", "two")
    ]
    values = {"model": {"path": str(tmp_path)}, "data": {"train": str(train), "eval": held_out}, "eval": {"rows": 3}}
    _, tasks = open_prompts(load_config(values), tokenizer, greedy=0)
    assert [(task.data_source, task.row) for task in tasks or ()] == [("one", 0), ("two", 4), ("two", 5)]


@pytest.mark.parametrize("kind", ["plain", "weighted", "taught"])
def test_a_restart_continues_with_the_rows_that_come_next(tmp_path: Path, kind: str) -> None:
    sources: list[dict[str, Any]] = [
        {"path": str(write_jsonl(tmp_path / f"{name}.jsonl", [record(i) for i in rows])), "name": name}
        for name, rows in (("easy", range(10)), ("hard", range(10, 40)))
    ]
    data: dict[str, Any] = {"train": sources}
    if kind == "weighted":
        sources[0]["weight"], sources[1]["weight"] = 3.0, 1.0
    if kind == "taught":
        (tmp_path / "plan.py").write_text(CURRICULUM)
        data["curriculum"] = f"{tmp_path / 'plan.py'}:curriculum"
    config = load_config({"model": {"path": "m"}, "data": data})

    def prompts(first: int, last: int) -> list[Any]:
        rows, order = open_training_prompts(config)
        return [row.prompt for row in rows.rows([order.locate(ordinal)[1] for ordinal in range(first, last)])]

    whole = prompts(1, 161)
    assert prompts(101, 161) == whole[100:]
    easy = sum(int(str(prompt).partition("+")[0]) < 10 for prompt in whole)
    assert abs(easy - {"plain": 40, "weighted": 120, "taught": 64 + 24}[kind]) <= 2


def test_a_late_row_is_named_before_a_run_trains(tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811 - the fixture
    rows = [record(index) for index in range(12)]
    rows[10]["prompt"] = [{"role": "user"}]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    config = load_config({"model": {"path": str(tmp_path)}, "data": {"train": str(train)}})
    open_prompts(config, tokenizer, greedy=0)
    with pytest.raises(DataError, match=r"train\.jsonl, row 10: field `prompt\[0\].content` is missing"):
        check_training_prompts(config).wait()
