"""The data of a configuration: training rows after a restart, and the sampling of each side's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.coordinator.prompt_sources import open_held_out, open_prompts, open_training_rows
from rollmesh.mesh.config import load_config
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
        rows, order = open_training_rows(config)
        return [row.prompt for row in rows.rows([order.locate(ordinal)[1] for ordinal in range(first, last)])]

    whole = prompts(1, 161)
    assert prompts(101, 161) == whole[100:]
    easy = sum(int(str(prompt).partition("+")[0]) < 10 for prompt in whole)
    assert abs(easy - {"plain": 40, "weighted": 120, "taught": 64 + 24}[kind]) <= 2
