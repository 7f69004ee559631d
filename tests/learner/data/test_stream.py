"""Prompt tasks: deterministic ordinals, skipping, the end of the data, and what a task holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.data.order import DataOrder
from rollmesh.learner.data.prompts import PromptEncoder, TaskShape
from rollmesh.learner.data.stream import PromptStream
from rollmesh.mesh.errors import DataError
from rollmesh.protos import trajectory_pb2
from tests.learner.data.conftest import open_file, record, write_jsonl


def stream(
    path: Path,
    tokenizer: Any,
    *,
    seed: int = 0,
    epochs: int | None = None,
    longest: int = 16,
    refuse: bool = False,
    **template: Any,
) -> PromptStream:
    source = open_file(path)
    return PromptStream(
        source,
        DataOrder(len(source), seed=seed, shuffle=True, epochs=epochs),
        PromptEncoder(tokenizer, max_prompt_tokens=longest, template_kwargs=template),
        TaskShape(n=4, temperature=0.5, max_tokens=9, stop=("=",)),
        on_refused="refuse" if refuse else "skip",
    )


@given(rows=st.integers(1, 40), seed=st.integers(0, 5), ordinals=st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_order_is_a_function_of_the_ordinal(rows: int, seed: int, ordinals: list[int]) -> None:
    one = DataOrder(rows, seed=seed, shuffle=True, epochs=None)
    places = [one.locate(ordinal) for ordinal in ordinals]
    for ordinal, place in zip(ordinals, places, strict=True):
        assert DataOrder(rows, seed=seed, shuffle=True, epochs=None).locate(ordinal) == place
    epoch = [one.locate(rows + position)[1] for position in range(1, rows + 1)]
    assert sorted(epoch) == list(range(rows))


def test_epochs_differ_and_end() -> None:
    order = DataOrder(50, seed=0, shuffle=True, epochs=2)
    first, second = ([order.locate(50 * e + p)[1] for p in range(1, 51)] for e in (0, 1))
    assert first != second
    assert order.last_ordinal == 100
    with pytest.raises(IndexError):
        order.locate(101)
    assert [DataOrder(3, seed=0, shuffle=False, epochs=None).locate(o) for o in (1, 3, 4)] == [(0, 0), (0, 2), (1, 0)]


def test_a_stream_goes_on_behind_any_cursor(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record(i) for i in range(7)])
    whole = stream(path, tokenizer).after(0, 20).tasks
    resumed = stream(path, tokenizer).after(11, 9).tasks
    assert [t.ordinal for t in whole] == list(range(1, 21))
    assert [t.SerializeToString() for t in whole[11:]] == [t.SerializeToString() for t in resumed]
    assert len({t.task_id for t in whole}) == 20
    assert len({t.sampling.seed for t in whole}) == 20
    assert [t.row for t in whole[:7]] != [t.row for t in stream(path, tokenizer, seed=1).after(0, 7).tasks]


def test_a_task_holds_what_the_mesh_needs(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record(5)])
    (task,) = stream(path, tokenizer).after(0, 1).tasks
    assert task.prompt_text == "5+1="
    assert np.frombuffer(task.prompt_ids, "<i4").tolist() == tokenizer("5+1=")["input_ids"]
    assert (task.n, task.data_source, json.loads(task.ground_truth_json)) == (4, "addition", "6")
    assert json.loads(task.extra_info_json) == {"index": 5}
    assert (task.sampling.temperature, task.sampling.max_tokens, list(task.sampling.stop)) == (0.5, 9, ["="])


def test_greedy_baselines_come_on_top_of_the_group(tmp_path: Path, tokenizer: Any) -> None:
    source = open_file(write_jsonl(tmp_path / "d.jsonl", [record(5)]))
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=16, template_kwargs={})
    shape = TaskShape(n=4, temperature=0.5, max_tokens=9, greedy=1)
    task = encoder.encode(source.rows([0])[0], shape, number=0, task_id="t", ordinal=1)
    assert isinstance(task, trajectory_pb2.PromptTask)
    assert (task.n, task.greedy, task.sampling.temperature) == (5, 1, 0.5)


def test_chat_messages_go_through_the_template(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record(0, prompt=[{"role": "u", "content": "1+1="}])])
    assert stream(path, tokenizer).after(0, 1).tasks[0].prompt_text == "<u>1+1=<a>"
    assert stream(path, tokenizer, think=True).after(0, 1).tasks[0].prompt_text == "<u>1+1=<a>t"


def test_a_tokenizer_without_a_template_is_named(tmp_path: Path, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    path = write_jsonl(tmp_path / "d.jsonl", [record(0, prompt=[{"role": "u", "content": "1+1="}])])
    with pytest.raises(DataError, match="no chat template"):
        stream(path, tokenizer).after(0, 1)


def test_long_and_empty_prompts_are_skipped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [record(0), record(1, prompt="1" * 17), record(2, prompt=""), record(3)]
    prompts = stream(write_jsonl(tmp_path / "d.jsonl", rows), tokenizer, epochs=1)
    window = prompts.after(0, 4)
    assert {t.row for t in window.tasks} == {0, 3}
    assert (window.end, window.last_ordinal) == (True, 4)
    assert prompts.refused == {"long_prompt": 1, "empty_prompt": 1}


def test_refusing_names_the_row_before_the_run(tmp_path: Path, tokenizer: Any) -> None:
    rows = [record(0), record(1, prompt="1" * 17)]
    prompts = stream(write_jsonl(tmp_path / "d.jsonl", rows), tokenizer, refuse=True)
    with pytest.raises(DataError, match=r"row 1: long prompt \(17 tokens\)"):
        prompts.check()


def test_data_without_one_usable_prompt_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    rows = [record(i, prompt="1" * 17) for i in range(3)]
    with pytest.raises(DataError, match="no prompt of the dataset"):
        stream(write_jsonl(tmp_path / "d.jsonl", rows), tokenizer).after(0, 2)


def test_the_end_of_the_data_is_said_with_the_last_task(tmp_path: Path, tokenizer: Any) -> None:
    prompts = stream(write_jsonl(tmp_path / "d.jsonl", [record(i) for i in range(3)]), tokenizer, epochs=2)
    first, second = prompts.after(0, 4), prompts.after(4, 4)
    assert (len(first.tasks), first.end) == (4, False)
    assert (len(second.tasks), second.end) == (2, True)
    assert prompts.after(6, 4).tasks == []


def test_a_source_may_have_template_arguments_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record(0, prompt=[{"role": "u", "content": "1+1="}])])
    row = open_file(path, chat_template_kwargs={"think": True}).rows([0])[0]
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=16, template_kwargs={"think": False})
    task = encoder.encode(row, TaskShape(n=1, temperature=1.0, max_tokens=9), number=0, task_id="t", ordinal=1)
    assert isinstance(task, trajectory_pb2.PromptTask)
    assert task.prompt_text == "<u>1+1=<a>t"
