"""Arguments of the template and tools that single rows bring: obeyed wherever rows are rendered, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.dataset import open_rows, row_form
from rollmesh.learner.data.examples import ExampleForm
from rollmesh.learner.data.preference_rows import LabeledForm, PairForm, ScoredPairForm
from rollmesh.learner.data.prompts import AgentPrompts, PromptEncoder
from rollmesh.learner.data.supervised_rows import SupervisedForm
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.sections import RowsSection, SupervisedRowsSection
from rollmesh.mesh.errors import DataError
from tests import chat_templates as of
from tests.learner.data.conftest import write_jsonl

USER, ANSWER, OTHER = ({"role": role, "content": text} for role, text in
                       (("user", "hello"), ("assistant", "world"), ("assistant", "no")))  # fmt: skip
SYSTEM = {"role": "system", "content": "be kind"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ANOTHER = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}
KINDS = ("sft", "dpo", "rm", "kto", "prompts", "verl")


def rendered(kind: str, source: str, row: dict[str, Any], tmp_path: Path, *messages: dict[str, Any]) -> str:
    """The text of a row of one kind, with further fields."""
    tokenizer = of.tokenizer_for(source)
    begun = list(messages or [USER])
    if kind in ("prompts", "verl"):
        truth = {"answer": "4"} if kind == "prompts" else {"data_source": "d", "reward_model": {"ground_truth": "4"}}
        path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": begun, **truth, **row}])
        given = DataSource(path=str(path))
        [read] = open_rows(given, row_form(given, "prompt")).rows([0])
        encoder = PromptEncoder(tokenizer, max_prompt_tokens=999, template_kwargs={})
        return str(tokenizer.decode(encoder.ids(read)))
    chat, section = ChatEncoder(tokenizer), RowsSection.model_validate({"train": "x"})
    forms: dict[str, tuple[ExampleForm, dict[str, Any]]] = {
        "sft": (
            SupervisedForm(chat, SupervisedRowsSection.model_validate({"train": "x"}), "prompt"),
            {"messages": [*begun, ANSWER]},
        ),
        "dpo": (PairForm(chat, section, "prompt"), {"prompt": begun, "chosen": [ANSWER], "rejected": [OTHER]}),
        "rm": (ScoredPairForm(chat, section, "prompt"), {"prompt": begun, "chosen": [ANSWER], "rejected": [OTHER]}),
        "kto": (LabeledForm(chat, section, "prompt"), {"prompt": begun, "completion": [ANSWER], "label": True}),
    }
    form, fields = forms[kind]
    example = form.parse(tmp_path / "rows", 0, {**fields, **row}, list(fields))
    assert example is not None
    sequence = example.sequences[0]
    return str(tokenizer.decode([*sequence.prompt_ids, *sequence.response_ids]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "row",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": '{"enable_thinking": false, "unknown": null}'},
        {"enable_thinking": False},
    ],
    ids=["object", "JSON text", "column"],
)
def test_arguments_of_a_row_reach_its_template(kind: str, row: dict[str, Any], tmp_path: Path) -> None:
    text = rendered(kind, of.ARGUMENTS, row, tmp_path)
    assert "hello" in text
    assert "<think>" not in text
    shown = {"chat_template_kwargs": {"documents": [{"text": "a fact"}], "enable_thinking": False}}
    assert "a fact" in rendered(kind, of.ARGUMENTS, shown, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"chat_template_kwargs": {"documents": [{"text": "a fact"}]}},
            "has documents, and the chat template does not",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "has tokenize, which is no argument"),
        ({"chat_template_kwargs": [1]}, "field `chat_template_kwargs` is list"),
        ({"enable_thinking": "yes"}, "field `enable_thinking` is 'yes'"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "contradict each other"),
        ({"enable_thinking": True}, "has enable_thinking, and the chat template does not read it"),
    ],
)
def test_arguments_that_cannot_be_obeyed_are_refused(
    kind: str, row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"row 0: .*{words}") as caught:
        rendered(kind, of.CHATML, row, tmp_path)
    assert any(remedy in caught.value.hint for remedy in ("remove", "leave", "write"))
    assert rendered(kind, of.CHATML, {}, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_of_a_message_are_those_of_its_row(kind: str, name: str, tmp_path: Path) -> None:
    meant = rendered(kind, of.CHATML, {"tools": [TOOL]}, tmp_path, SYSTEM, USER)
    assert '"name": "add"' in meant
    for tools in ([TOOL], json.dumps([TOOL["function"]])):
        assert rendered(kind, of.CHATML, {}, tmp_path, {**SYSTEM, name: tools}, USER) == meant
        both = {"tools": [TOOL]}
        assert rendered(kind, of.CHATML, both, tmp_path, {**SYSTEM, name: tools}, USER) == meant
    assert rendered(kind, of.CHATML, {}, tmp_path, {**SYSTEM, name: None}, {**USER, name: []}) == rendered(
        kind, of.CHATML, {}, tmp_path, SYSTEM, USER
    )


@pytest.mark.parametrize("kind", KINDS)
def test_tools_that_a_template_cannot_show_where_they_stand_are_refused(kind: str, tmp_path: Path) -> None:
    late = [USER, ANSWER, {**USER, "tools": [TOOL]}]
    for messages, words in (
        ([{**SYSTEM, "tools": [TOOL]}, {**USER, "tools": [ANOTHER]}], "message 1 has `tools` of its own, and others"),
        (late, "message 2 has `tools` of its own, after an answer"),
        ([{**USER, "tools": [1]}], r"field `message 0.tools\[0\]` is int"),
    ):
        with pytest.raises(DataError, match=words):
            rendered(kind, of.CHATML, {}, tmp_path, *messages)
    with pytest.raises(DataError, match="does not show them"):
        rendered(kind, of.TRIMS, {}, tmp_path, {**SYSTEM, "tools": [TOOL]}, USER)
    # The remedy.
    assert '"add"' in rendered(kind, of.CHATML, {"tools": [TOOL]}, tmp_path, USER, ANSWER, USER)


def read_prompt(tmp_path: Path, row: dict[str, Any], agent: AgentPrompts | None, **run: Any) -> str:
    tokenizer = of.tokenizer_for(of.CHATML + "{{ 'LOUD' if shout }}")
    given = DataSource(path=str(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": [USER], "answer": "4", **row}])))
    [read] = open_rows(given, row_form(given, "prompt")).rows([0])
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=999, template_kwargs=run, agent=agent)
    return str(tokenizer.decode(encoder.ids(read)))


def test_rows_of_agents_show_the_tools_of_the_agent(tmp_path: Path) -> None:
    agent = AgentPrompts([TOOL])
    with pytest.raises(DataError, match="row 0: it has tools of its own, and an agent calls") as caught:
        read_prompt(tmp_path, {"tools": [ANOTHER]}, agent)
    assert "name that column otherwise" in caught.value.hint
    meant = read_prompt(tmp_path, {}, agent)
    for row in ({"tools": [TOOL]}, {"tools_of_another_name": [ANOTHER]}, {"tools": ["calculator"]}):
        assert read_prompt(tmp_path, row, agent) == meant
    # A program reads its row itself.
    assert read_prompt(tmp_path, {"tools": [ANOTHER]}, AgentPrompts(own=True))


def test_programs_and_rewards_find_the_tools_of_messages_with_those_of_rows(tmp_path: Path) -> None:
    given = DataSource(path=str(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": [{**USER, "tools": [TOOL]}]}])))
    [read] = open_rows(given, row_form(given, "prompt")).rows([0])
    assert list(read.tools) == read.extra_info["tools"] == [TOOL]
    assert read.extra_info["prompt_messages"] == [USER]


def test_rows_of_agents_have_the_arguments_of_the_run(tmp_path: Path) -> None:
    row = {"chat_template_kwargs": {"shout": True}}
    with pytest.raises(DataError, match="row 0: it has chat_template_kwargs of its own: shout") as caught:
        read_prompt(tmp_path, row, AgentPrompts())
    assert "data.chat_template_kwargs" in caught.value.hint
    assert "LOUD" in read_prompt(tmp_path, row, AgentPrompts(), shout=True)


def test_a_text_has_neither_tools_nor_arguments(tmp_path: Path) -> None:
    for row, words in (
        ({"tools": [TOOL]}, "row 0: it has tools, and its prompt is a text"),
        ({"enable_thinking": True}, "row 0: its prompt is a text, and `enable_thinking`"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            read_prompt(tmp_path, {"prompt": "hello", **row}, None)
        assert "write the prompt as messages" in caught.value.hint
    assert (
        read_prompt(tmp_path, {"prompt": "hello", "tools": ["calculator"], "enable_thinking": False}, None) == "hello"
    )
