"""Datasets as they are published, from JSONL and from Parquet: read as meant, or refused with a remedy that helps.

Each has three rows in the columns of the dataset, written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.dataset import open_rows, row_form
from rollmesh.learner.data.examples import ExampleForm
from rollmesh.learner.data.preference_rows import PairForm
from rollmesh.learner.data.records import Record
from rollmesh.learner.data.supervised_rows import Continuation, Conversation, SupervisedForm
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.sections import RowsSection, SupervisedRowsSection
from rollmesh.mesh.errors import DataError
from tests.learner.data.test_chat_turns import PLAIN, make_tokenizer

Rows = list[dict[str, Any]]
CHAT = ChatEncoder(make_tokenizer(PLAIN))


@dataclass(frozen=True)
class AsRead:
    """The form of rows whose parts are compared, not their tokens."""

    form: ExampleForm
    names: Collection[str] = field(default=())

    def columns(self, names: Collection[str]) -> list[str]:
        return list(names)

    def check(self, path: Path, index: int, record: Record, names: Collection[str]) -> None:
        self.form.check(path, index, record, names)

    def parse(self, path: Path, index: int, record: Record, names: Collection[str]) -> object:
        return self.form.read(record)


def supervised(path: Path, **settings: Any) -> list[Any]:
    section = SupervisedRowsSection.model_validate({"train": "x", **settings})
    form = AsRead(SupervisedForm(CHAT, section, section.prompt_key))
    return list(open_rows(DataSource(path=str(path)), form).rows(range(3)))


def pairs(path: Path) -> list[Any]:
    form = AsRead(PairForm(CHAT, RowsSection.model_validate({"train": "x"}), "prompt"))
    return list(open_rows(DataSource(path=str(path)), form).rows(range(3)))


def prompts(path: Path, prompt_key: str = "prompt", **settings: Any) -> list[Any]:
    source = DataSource(path=str(path), **settings)
    read = open_rows(source, row_form(source, prompt_key)).rows(range(3))
    return [(row.prompt, row.data_source, row.ground_truth, row.extra_info) for row in read]


@pytest.fixture(params=["jsonl", "parquet"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Rows], Path]:
    def written(rows: Rows) -> Path:
        path = tmp_path / f"rows.{request.param}"
        if request.param == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        return path

    return written


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"name": name, "description": "d", "parameters": {"type": "object", "properties": properties}}


def shown(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": each} for each in tools]


Write = Callable[[Rows], Path]


def test_ultrafeedback_binarized(write: Write) -> None:
    rows = [
        {
            "prompt": f"why {index}?",
            "prompt_id": str(index),
            "chosen": [user(f"why {index}?"), said("because")],
            "rejected": [user(f"why {index}?"), said("no idea")],
            "messages": [user(f"why {index}?"), said("because")],
            "score_chosen": 8.0,
            "score_rejected": 2.5,
        }
        for index in range(3)
    ]
    path = write(rows)
    assert pairs(path) == [([user(f"why {index}?")], [said("because")], [said("no idea")]) for index in range(3)]
    assert [read.messages for read in supervised(path)] == [row["messages"] for row in rows]


def test_hh_rlhf(write: Write) -> None:
    begun = [f"\n\nHuman: why {index}?\n\nAssistant:" for index in range(3)]
    path = write([{"chosen": f"{text} so it is", "rejected": f"{text} no idea"} for text in begun])
    assert pairs(path) == [(text, " so it is", " no idea") for text in begun]
    with pytest.raises(DataError, match="row 0: its fields are chosen, rejected") as caught:
        supervised(path)
    assert "`rollmesh dpo`" in caught.value.hint


def test_tulu(write: Write) -> None:
    chats = [[user("a"), said("b")], [user("a"), said("b"), user("c"), said("d")], [{**user("s"), "role": "system"}]]
    chats[2] += chats[0]
    path = write([{"id": f"t_{number}", "messages": chat, "source": "s"} for number, chat in enumerate(chats)])
    read = supervised(path)
    assert [(row.messages, list(row.turns)) for row in read] == [
        (chat, turns) for chat, turns in zip(chats, ([1], [1, 3], [2]), strict=True)
    ]


def test_openhermes(write: Write) -> None:
    def turn(speaker: str, text: str, weight: float | None = None) -> dict[str, Any]:
        return {"from": speaker, "value": text, "weight": weight}

    rows: Rows = [
        {"id": "1", "conversations": [turn("human", "a"), turn("gpt", "b")], "system_prompt": None, "views": None},
        {"id": "2", "conversations": [turn("human", "a"), turn("gpt", "b")], "system_prompt": "be brief", "views": 3},
        {
            "id": "3",
            "conversations": [
                turn("system", "s"),
                turn("human", "a", 0),
                turn("gpt", "b", 0),
                turn("human", "c"),
                turn("gpt", "d", 1),
            ],
            "system_prompt": None,
            "views": None,
        },
    ]
    path = write(rows)
    system = {"role": "system", "content": "be brief"}
    assert supervised(path) == [
        Conversation([user("a"), said("b")], [1]),
        Conversation([system, user("a"), said("b")], [2]),
        Conversation([{**system, "content": "s"}, user("a"), said("b"), user("c"), said("d")], [4]),
    ]
    rows[1]["conversations"][0]["weight"] = 1.0
    with pytest.raises(
        DataError, match=r"row 1: message 1 \(user\) has `weight`: 1.0, as if it were trained"
    ) as caught:
        supervised(write(rows))
    assert "leave `weight` out there, or write 0" in caught.value.hint
    rows[1]["conversations"][0]["weight"] = 0.0
    assert len(supervised(write(rows))) == 3


def test_xlam(write: Write) -> None:
    tools = [[tool("weather", city={"type": "string"})], [tool("add", a={"type": "int"}, b={"type": "int"})], []]
    tools[2] = [*tools[0], *tools[1]]
    answers = [
        [{"name": "weather", "arguments": {"city": "Paris"}}],
        [{"name": "add", "arguments": {"a": 1, "b": 2}}],
        [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "add", "arguments": {"a": 3, "b": 4}}],
    ]
    rows = [
        {"id": number, "query": "q", "answers": json.dumps(answers[number]), "tools": json.dumps(tools[number])}
        for number in range(3)
    ]
    path = write(rows)
    with pytest.raises(DataError, match="row 0: its fields are id, query, answers, tools") as caught:
        supervised(path)
    assert "data.prompt_key and data.response_key name other fields" in caught.value.hint
    read = supervised(path, prompt_key="query", response_key="answers")
    assert [row.tools for row in read] == [shown(*each) for each in tools]
    assert [row.messages[0] for row in read] == [user("q")] * 3
    assert [row.messages[1]["tool_calls"] for row in read] == [shown(*each) for each in answers]


def test_apigen_conversations(write: Write) -> None:
    tools = [tool("add", a={"type": "integer"})]
    turns = [
        {"from": "human", "value": "add 1"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "it is 2"},
    ]
    rows: Rows = [{"conversations": turns, "tools": json.dumps(tools), "system": "be exact"} for _ in range(3)]
    read = supervised(write(rows))
    chat = [user("add 1"), called("add", a=1), {"role": "tool", "content": "2"}, said("it is 2")]
    assert read == [Conversation([{"role": "system", "content": "be exact"}, *chat], [2, 4], shown(*tools))] * 3
    rows[2]["tools"] = "add(a)"
    with pytest.raises(DataError, match="row 2: field `tools` is a text, and no JSON") as caught:
        supervised(write(rows))
    assert caught.value.hint == "write the structure itself, or its JSON text"
    for whole in (tools, json.dumps(tools)):
        assert supervised(write([{**row, "tools": whole} for row in rows]))[2].tools == shown(*tools)


def test_tools_of_rows_differ_from_each_other(write: Write) -> None:
    """In a table each schema and each call has the fields of all."""
    tools = [tool("weather", city={"type": "string"}), tool("add", a={"type": "integer"}), tool("now")]
    tools[2]["parameters"]["required"] = []
    calls = [called("weather", city="Paris"), called("add", a=1), called("weather", city="Rome", days=[1, 2])]
    rows = [{"messages": [user("q"), calls[number]], "tools": shown(tools[number])} for number in range(3)]
    # Parquet knows no type without fields.
    tools[2]["parameters"]["properties"]["zone"] = {"type": "string"}
    read = supervised(write(rows))
    assert read == [Conversation([user("q"), calls[number]], [1], shown(tools[number])) for number in range(3)]


def test_glaive(write: Write) -> None:
    rows: Rows = [
        {"system": "SYSTEM: You have tools.", "chat": "USER: hi\n\n\nASSISTANT: yes <|endoftext|>\n\n\n"}
        for _ in range(3)
    ]
    with pytest.raises(DataError, match="row 0: its fields are system, chat") as caught:
        supervised(write(rows))
    assert caught.value.hint.startswith("rows need `messages`")
    read = supervised(write([{"messages": [user("hi"), said("yes")], "system": "You have tools."} for _ in rows]))
    assert [len(row.messages) for row in read] == [3] * 3


def test_gsm8k(write: Write) -> None:
    rows = [{"question": f"1 + {index}?", "answer": f"so\n#### {index + 1}"} for index in range(3)]
    path = write(rows)
    assert supervised(path, prompt_key="question", response_key="answer") == [
        Continuation(row["question"], row["answer"]) for row in rows
    ]
    with pytest.raises(DataError, match="row 0: field `prompt` is missing") as caught:
        prompts(path)
    assert "data.prompt_key" in caught.value.hint
    assert [row[:3] for row in prompts(path, "question", name="gsm8k")] == [
        (row["question"], "gsm8k", row["answer"]) for row in rows
    ]


def test_math(write: Write) -> None:
    rows = [
        {"problem": f"p {index}", "level": "Level 1", "type": "Algebra", "solution": rf"so \boxed{{{index}}}"}
        for index in range(3)
    ]
    path = write(rows)
    assert [row[0] for row in prompts(path, "problem")] == ["p 0", "p 1", "p 2"]
    assert [row[2] for row in prompts(path, "problem")] == [row["solution"] for row in rows]
    read = supervised(path, prompt_key="problem", response_key="solution", as_chat=True)
    assert [row.messages for row in read] == [[user(row["problem"]), said(row["solution"])] for row in rows]


def test_dapo_math_17k(write: Write) -> None:
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [user(f"p {index}")],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(index), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{index}"},
        }
        for index in range(3)
    ]
    assert prompts(write(rows)) == [
        (row["prompt"], "math_dapo", str(i), row["extra_info"]) for i, row in enumerate(rows)
    ]


def test_skywork_or1(write: Write) -> None:
    rows: Rows = [
        {
            "data_source": "train-math",
            "prompt": [user(f"p {index}")],
            "ability": "math",
            "reward_model": {"ground_truth": f'["{index}"]', "style": "rule"},
            "extra_info": {"index": index, "model_difficulty": {"a" if index else "b": 4}},
        }
        for index in range(3)
    ]
    assert prompts(write(rows)) == [
        (row["prompt"], "train-math", row["reward_model"]["ground_truth"], row["extra_info"]) for row in rows
    ]
    texts = [{**row, **{key: json.dumps(row[key]) for key in ("prompt", "reward_model", "extra_info")}} for row in rows]
    assert prompts(write(texts)) == prompts(write(rows))


def test_prompts_with_calls_in_their_history(write: Write) -> None:
    history = [user("q"), called("add", a=1), {"role": "tool", "content": "2"}, user("and?")]
    rows = [{"prompt": history, "answer": "2"}] * 3
    assert [row[0] for row in prompts(write(rows))] == [history] * 3
    given = json.loads(json.dumps(history))
    given[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    read = prompts(write([{"prompt": given, "answer": "2"}] * 3))
    assert [row[0] for row in read] == [history] * 3
    assert read[0][3]["prompt_messages"] == history, "reward functions see the same"


def test_images_may_be_a_text_of_their_list(write: Write) -> None:
    rows = [{"prompt": "<image>?", "answer": "2", "images": '["a.png"]'}] * 3
    source = DataSource(path=str(write(rows)))
    [row] = open_rows(source, row_form(source, "prompt")).rows([0])
    assert [image.name for image in row.images if isinstance(image, Path)] == ["a.png"]
