"""Facts about templates of every habit, and messages in the form that each takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmesh.mesh.chat.description import describe
from rollmesh.mesh.chat.facts import TemplateFacts, TurnEnd
from rollmesh.mesh.chat.fitting import fit
from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.errors import ChatTemplateError
from tests import chat_templates as of

SAID = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
IN_PARTS = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in SAID]
ID = "call_0123456789abcdef01234567"


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate.of(of.tokenizer_for(source))


def facts(source: str) -> TemplateFacts:
    return facts_of(template_of(source))


def call(arguments: Any) -> list[dict[str, Any]]:
    """A call and its result."""
    function = {"name": "add", "arguments": arguments}
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": ID, "type": "function", "function": function}]},
        {"role": "tool", "name": "add", "tool_call_id": ID, "content": "3"},
    ]


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (of.CHATML, TurnEnd(("<|im_end|>",), "after the turn")),
        (of.MARKED_WITHOUT_END, TurnEnd(("<|im_end|>",), "after the turn")),
        (of.NEXT_ROLE, TurnEnd(("<|user|>", "<|tool|>"), "by the next message")),
        (of.NEVER, TurnEnd((), "never")),
        (of.ANOTHER_END_ONCE_FOLLOWED, TurnEnd(("<|return|>",), "after the turn")),
    ],
)
def test_the_end_of_a_turn_is_found(source: str, end: TurnEnd) -> None:
    assert facts(source).end == end


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (of.CHATML, {"tools": True, "arguments": "object", "prompt_is_prefix": True, "rewrites": False}),
        (of.PARTS, {"contents": dict.fromkeys(of.ROLES, ("parts",)), "tools": False}),
        (of.TRIMS, {"trims": True, "begin": True, "arguments": ""}),
        (of.OPENS_THOUGHTS, {"opened_thoughts": "<think>", "prompt_is_prefix": False, "drops_thoughts": True}),
        (of.ANOTHER_END_ONCE_FOLLOWED, {"rewrites": True}),
        (of.STRICT, {"alternates": True, "contents": {"user": ("text",), "assistant": ("text",)}}),
        (of.NINE_LETTERS, {"nine_letter_ids": True, "arguments": "object"}),
        (of.ARGUMENTS_AS_TEXT, {"arguments": "text"}),
        (of.DEFAULT_SYSTEM, {"default_system": "Be kind."}),
        (of.THOUGHTS_APART, {"thoughts_field": "reasoning_content"}),
        (of.MARKED, {"marks": "with the end"}),
        (of.MARKED_WITHOUT_END, {"marks": "without the end"}),
    ],
)
def test_each_habit_is_found(source: str, expected: dict[str, Any]) -> None:
    found = facts(source)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_role_whose_words_vanish_is_missing_and_refused_by_name() -> None:
    found = facts(of.LOSES_SYSTEM)
    assert "system" not in found.contents
    with pytest.raises(ChatTemplateError, match="message 0 has the role system") as caught:
        fit([{"role": "system", "content": "be kind"}, *SAID], found)
    # The remedy.
    assert "into the user's" in caught.value.hint
    assert "be kind hello" in template_of(of.LOSES_SYSTEM).render(
        fit([{"role": "user", "content": "be kind hello"}], found)
    )


@pytest.mark.parametrize("source", [of.CHATML, of.PARTS, of.TRIMS, of.NEVER, of.MARKED])
def test_texts_and_parts_are_written_alike(source: str) -> None:
    template, found = template_of(source), facts(source)
    written = {template.render(fit(messages, found)) for messages in (SAID, IN_PARTS)}
    (text,) = written
    assert text.count("hello") == text.count("world") == 1
    assert "type" not in text


@pytest.mark.parametrize("source", [of.CHATML, of.NINE_LETTERS, of.ARGUMENTS_AS_TEXT])
@pytest.mark.parametrize("arguments", [{"a": 1, "b": "ü"}, '{"a": 1, "b": "ü"}'], ids=["object", "JSON text"])
def test_arguments_are_written_once_and_ids_as_they_are_taken(source: str, arguments: Any) -> None:
    found = facts(source)
    text = template_of(source).render(fit(call(arguments), found), tools=[{"type": "function"}])
    written = text.partition('"arguments": ')[2].partition("}\n</tool_call>")[0]
    assert json.loads(written) == {"a": 1, "b": "ü"}
    fitted = fit(call(arguments), found)
    assert fitted[1]["tool_calls"][0]["id"] == fitted[2]["tool_call_id"]


def test_a_part_that_no_text_stands_for_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="part of type image"):
        fit([{"role": "user", "content": [{"type": "image"}]}], facts(of.CHATML))
    fit([{"role": "user", "content": [{"type": "image"}]}], facts(of.PARTS))


def test_calls_are_refused_by_a_template_that_writes_none() -> None:
    with pytest.raises(ChatTemplateError, match="message 1 calls a tool"):
        fit(call({}), facts(of.TRIMS))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{% endfor %}", "with the words of both"),
        ("{{ messages }}", "with the words of both"),
        ("{{ messages | tojson }}", "with the words of both"),
        ("{% for m in messages %}{{ m.content | e }}{% endfor %}", "with the words of both"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "with the words of both"),
        ("{{ raise_exception('never') }}", "user assistant: never"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "refuses a conversation"),
    ],
)
def test_a_template_that_writes_no_conversation_is_refused(source: str, named: str) -> None:
    with pytest.raises(ChatTemplateError, match=named):
        facts(source)


def test_the_table_tells_how_a_developer_is_written() -> None:
    assert dict(describe(facts(of.KNOWN_ROLES)))["developer message"] == "written as a system message"
    assert "developer: text" in dict(describe(facts(of.CHATML)))["contents"]
    assert dict(describe(facts(of.THOUGHTS_APART)))["thoughts apart from contents"] == (
        "written, from `reasoning_content`"
    )


def test_a_call_reads_as_the_template_writes_it() -> None:
    assert facts(of.CHATML).call.startswith(
        '<tool_call>\n{"name": "probe_tool", "arguments": {"probe_key": "probevalue"}}'
    )
    assert facts(of.TRIMS).call == ""


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{{ range(10000) | random }}", "otherwise each time"),
        ("{{ strftime_now('%H:%M') }}", "time of day"),
        ("{{ strftime_now('%c') }}", "time of day"),
    ],
)
def test_a_template_that_writes_a_conversation_in_several_ways_is_refused(written: str, said: str) -> None:
    with pytest.raises(ChatTemplateError, match=said):
        facts(written + of.CHATML)


def test_a_template_may_write_the_date() -> None:
    assert facts("{{ strftime_now('%Y-%m-%d') }}" + of.CHATML).prompt_is_prefix


def test_a_template_that_writes_without_measure_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="for a conversation of 2 short messages"):
        facts("{{ 'a' * 2000000 }}" + of.CHATML)


def test_calls_and_results_without_ids_belong_together_by_their_order() -> None:
    """As published datasets have them, for templates that want ids of nine letters."""
    known = facts(of.NINE_LETTERS)
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    result = {"role": "tool", "content": "warm"}
    both = {"role": "assistant", "content": "", "tool_calls": [{"function": function}, {"function": function}]}
    one_has_it = {**both, "tool_calls": [{"id": "call_abc", "function": function}, {"function": function}]}
    named = {**result, "tool_call_id": "call_abc"}
    messages = [{"role": "user", "content": "?"}, both, result, result, one_has_it, named, result]

    fitted = fit(messages, known)

    called = [call["id"] for message in fitted for call in message.get("tool_calls", ())]
    assert [message["tool_call_id"] for message in fitted if message["role"] == "tool"] == called
    assert len(set(called)) == 4
    assert fit(messages[:3], known) == fitted[:3], "a beginning stays as it was"
