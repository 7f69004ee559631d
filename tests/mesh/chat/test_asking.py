"""Each message of a conversation is written as its author's, or refused by name with a remedy that helps."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.mesh.chat.arguments import TemplatesByArguments
from rollmesh.mesh.errors import ChatTemplateError
from tests import chat_templates as of

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}


def told(role: str, content: Any = "be kind") -> dict[str, Any]:
    return {"role": role, "content": content}


def called(content: Any, *names: str) -> dict[str, Any]:
    calls = [{"id": name * 9, "type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def written(source: str, *messages: dict[str, Any], tools: Any = None, **arguments: Any) -> str:
    asked = TemplatesByArguments(of.tokenizer_for(source), {}).of_row(arguments, tools=bool(tools))
    return asked.template.render(asked.fit(messages, tools), tools=tools)


@pytest.mark.parametrize("role", ["system", "developer", "tool", "critic", "context", "ipython"])
def test_a_template_that_writes_any_role_writes_each(role: str) -> None:
    assert f"<|{role}|>be kind" in written(of.CHATML, USER, ANSWER, told(role), USER, ANSWER)
    assert f"<|{role}|>be kind" in written(of.PARTS, USER, ANSWER, told(role), USER, ANSWER)


@pytest.mark.parametrize("source", [of.KNOWN_ROLES, of.DEFAULT_SYSTEM.replace(of.CHATML, of.KNOWN_ROLES)])
def test_a_developer_is_the_system_where_the_template_knows_no_developer(source: str) -> None:
    assert written(source, told("developer"), USER, ANSWER) == written(source, told("system"), USER, ANSWER)


@pytest.mark.parametrize(
    ("source", "messages", "words", "remedied"),
    [
        (of.KNOWN_ROLES, [told("critic"), USER, ANSWER], "0 has the role critic", [told("user"), ANSWER]),
        (of.KNOWN_ROLES, [USER, ANSWER, told("ipython")], "2 has the role ipython", [USER, ANSWER, told("tool")]),
        (of.KNOWN_ROLES, [USER, told("system"), ANSWER], "1 has the role system", [told("user"), ANSWER]),
        (of.KNOWN_ROLES, [USER, told("developer"), ANSWER], "1 has the role developer", [told("system"), USER, ANSWER]),
        (of.TWO_ROLES, [told("developer"), USER, ANSWER], "0 has the role developer", [told("user"), ANSWER]),
        (of.TWO_SPEAKERS, [USER, told("critic"), ANSWER], "as if it were of the assistant", [USER, ANSWER]),
        (of.TWO_SPEAKERS, [told("context"), USER, ANSWER], "as if it were of the assistant", [told("user"), ANSWER]),
        (of.CALLS_ALONE, [USER, called("I add", "f")], "1 has a content beside its calls", [USER, called("", "f")]),
        (of.ONE_CALL, [USER, called("", "f", "g")], "1 has 2 calls", [USER, called("", "f"), called("", "g")]),
    ],
)  # fmt: skip
def test_words_that_a_template_leaves_out_are_refused_by_name(
    source: str, messages: list[dict[str, Any]], words: str, remedied: list[dict[str, Any]]
) -> None:
    with pytest.raises(ChatTemplateError, match=words) as caught:
        written(source, *messages)
    assert caught.value.hint
    assert written(source, *remedied)


def test_calls_beside_words_and_several_of_them_are_written_where_the_template_writes_them() -> None:
    text = written(of.CHATML, USER, called("I add", "f", "g"), told("tool", "3"), ANSWER, tools=TOOLS)
    assert all(words in text for words in ("I add", '"f"', '"g"', "<|tool|>3"))


def test_a_shape_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TemplatesByArguments(of.tokenizer_for(of.CHATML), {}).of_row({}, tools=False)
    asked.fit([USER, ANSWER])
    monkeypatch.setattr(type(asked), "_check", None)
    asked.fit([told("user", "other words"), ANSWER])
    with pytest.raises(TypeError):
        asked.fit([USER, ANSWER, USER])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_apart_are_written_from_any_field(name: str) -> None:
    assert "<think>hm</think>world" in written(of.THOUGHTS_APART, USER, {**ANSWER, name: "hm"})


def test_arguments_of_a_row_are_obeyed_or_refused() -> None:
    templates = TemplatesByArguments(of.tokenizer_for(of.ARGUMENTS), {"shout": True})
    assert templates.of_row({}, tools=False).facts.opened_thoughts
    plain = templates.of_row({"enable_thinking": False, "shout": False}, tools=False)
    assert not plain.facts.opened_thoughts
    assert "LOUD" not in plain.template.render([USER])
    shown = templates.of_row({"documents": [{"text": "a fact"}]}, tools=False)
    assert "LOUD" in shown.template.render([USER])
    assert "a fact" in shown.template.render([USER])
    for name in ("volume", "tools", "add_generation_prompt"):
        with pytest.raises(ChatTemplateError, match=f"chat_template_kwargs has {name}") as caught:
            templates.of_row({name: True}, tools=False)
        assert f"remove {name}" in caught.value.hint
    assert templates.of_row({"volume": False}, tools=False).facts.opened_thoughts, "it asks for nothing"


def test_texts_that_differ_in_each_row_are_no_question_each(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = TemplatesByArguments(of.tokenizer_for("{{ date }}" + of.CHATML), {})
    known = [templates.of_row({"date": f"day {day}"}, tools=False) for day in range(70)]
    assert {id(asked.facts) for asked in known[64:]} == {id(known[64].facts)}
    assert known[69].template.render([USER]).startswith("day 69")
