"""One form of conversations, tools and calls, however a row writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmesh.learner.data.parts.messages import read_messages, same_message, text_or_messages
from rollmesh.learner.data.parts.tools import holds_calls, read_calls, read_tools
from rollmesh.mesh.errors import DataError

USER = {"role": "user", "content": "weather?"}
ANSWER = {"role": "assistant", "content": "fine"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "12"}


def calling(calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


@pytest.mark.parametrize(
    "written",
    [
        [USER, ANSWER],
        json.dumps([USER, ANSWER]),
        json.dumps(json.dumps([USER, ANSWER])),
        [json.dumps(USER), json.dumps(ANSWER)],
        [{"from": "human", "value": "weather?"}, {"from": "gpt", "value": "fine"}],
        json.dumps([{"from": "human", "value": "weather?"}, {"from": "gpt", "value": "fine"}]),
        [{"from": "user", "value": "weather?"}, {"from": "assistant", "value": "fine"}],
        [USER, {"role": "model", "content": "fine"}],
        [{**USER, "role": "prompter"}, {**ANSWER, "role": "bot"}],
        [{**USER, "name": None, "tool_calls": None}, {**ANSWER, "tool_calls": [], "function_call": None}],
    ],
)
def test_conversations(written: Any) -> None:
    assert read_messages(written, "messages") == [USER, ANSWER]


@pytest.mark.parametrize(("role", "meant"), [("assistent", "assistant"), ("usr", "user"), ("sytem", "system")])
def test_a_slip_in_a_role_is_named(role: str, meant: str) -> None:
    """A template that writes any role would make it a speaker that no one has met."""
    with pytest.raises(DataError, match=f"`messages\\[1\\].role` is {role!r}, .* nearly {meant!r}") as caught:
        read_messages([USER, {**ANSWER, "role": role}], "messages")
    assert f"write {meant!r}" in caught.value.hint
    for own in ("critic", "context", "ipython"):
        assert read_messages([{**USER, "role": own}], "messages")[0]["role"] == own


@pytest.mark.parametrize(
    "written",
    [
        CALLING,
        calling(json.dumps([CALL])),
        calling([json.dumps(CALL)]),
        calling(CALL),
        calling([{"type": "function", "function": json.dumps(CALL["function"])}]),
        calling([{"function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]),
        calling([{"function": {"name": "weather", "arguments": json.dumps('{"city": "Paris"}')}}]),
        calling([{"name": "weather", "arguments": {"city": "Paris"}}]),
        calling([{"name": "weather", "arguments": '{"city": "Paris"}'}]),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Paris"}'}},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
        {"from": "function_call", "value": '[{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}]'},
        {"role": "tool_call", "content": '{"name": "weather", "arguments": {"city": "Paris"}}'},
    ],
)
def test_calls_of_tools(written: dict[str, Any]) -> None:
    assert read_messages([USER, written, RESULT], "messages") == [USER, CALLING, RESULT]


@pytest.mark.parametrize(
    "written",
    [
        {"from": "observation", "value": "12"},
        {"from": "function_response", "value": "12"},
        {"from": "tool", "value": "12"},
        {"role": "function", "content": "12"},
    ],
)
def test_results_of_tools(written: dict[str, Any]) -> None:
    assert read_messages([CALLING, written], "messages")[1] == RESULT


@pytest.mark.parametrize(
    ("written", "meant"),
    [("User", "user"), ("ASSISTANT", "assistant"), (" System ", "system"), ("Human", "user"), ("AI", "assistant"),
     ("Developer", "developer"), ("function", "tool"), ("Critic", "Critic")],
)  # fmt: skip
def test_speakers_are_known_however_they_are_spelt(written: str, meant: str) -> None:
    assert [message["role"] for message in read_messages([{"role": written, "content": "a"}], "m")] == [meant]


def test_what_else_a_message_says_stays() -> None:
    told = {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "weather", "note": None}
    kept = calling([{"id": "c1", **CALL}], content="let me look", reasoning_content="hm")
    assert read_messages([kept, told], "messages") == [kept, told]


@pytest.mark.parametrize("arguments", ["", None, {}, "{}", ...])
def test_calls_without_arguments(arguments: Any) -> None:
    function = {"name": "now"} if arguments is ... else {"name": "now", "arguments": arguments}
    [call] = read_calls([{"function": function}], "calls")
    assert call["function"] == {"name": "now", "arguments": {}}


def test_nulls_of_arguments_are_the_authors() -> None:
    [call] = read_calls([{"function": {"name": "f", "arguments": '{"a": null}'}}], "calls")
    assert call["function"]["arguments"] == {"a": None}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ([{"role": "user"}], r"field `m\[0\].content` is missing( |$)"),
        ([{"role": "tool", "content": {"a": 1}}], r"field `m\[0\].content` is dict, which is not a string"),
        ([{"content": "x"}], r"field `m\[0\]` is no message: it has no `role`"),
        ([{"from": "narrator", "value": "x"}], r"field `m\[0\].from` is 'narrator'"),
        (["text"], r"field `m\[0\]` is str, expected a message"),
        ([None], r"field `m\[0\]` is null, expected a message"),
        ([{"role": "user", "content": None}], r"field `m\[0\].content` is null( |$)"),
        ([{"from": "human", "value": None}], r"field `m\[0\].value` is null( |$)"),
        ([{"role": "user", "value": None}], r"field `m\[0\].value` is null( |$)"),
        ([{"from": "human"}], r"field `m\[0\].value` is missing( |$)"),
        ("hello", "field `m` is a text, and no JSON"),
        ('[{"role": "user"', "field `m` is a text, and no JSON"),
        ([calling([{"function": {"arguments": {}}}])], r"field `m\[0\].tool_calls\[0\].function.name` is missing"),
        ([calling([{"function": {"name": "f", "arguments": "{a: 1"}}])], r"function.arguments` is a text, and no JSON"),
        ([calling([{"function": {"name": "f", "arguments": "[1]"}}])], r"function.arguments` is list, expected an obj"),
        ([{"from": "function_call", "value": "f(1)"}], r"field `m\[0\].value` is a text, and no JSON"),
        ([{"from": "function_call", "value": ""}], r"field `m\[0\]` is a call of a tool, and names none"),
    ],
)
def test_what_is_no_conversation_is_named(written: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_messages(written, "m")


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "[1, 2]",
        '[{"a": 1}]',
        '[not JSON with "role"',
        '[{"role": "user"}]',
        '[{"role": "x", "content": "y"}]',
        "",
    ],
)
def test_a_text_that_is_no_conversation_stays_a_text(text: str) -> None:
    assert text_or_messages(text, "prompt") == text


def test_a_prompt_may_be_the_text_of_a_conversation() -> None:
    assert text_or_messages(json.dumps([USER]), "prompt") == [USER]
    assert text_or_messages(ANSWER, "chosen") == [ANSWER], "a single message"


def test_messages_are_the_same_by_what_they_say() -> None:
    parts = [{"type": "text", "text": "weather"}, {"type": "text", "text": "? "}]
    assert same_message(USER, {**USER, "content": parts, "weight": 1})
    assert not same_message(USER, {**USER, "role": "assistant"})
    assert not same_message(CALLING, calling([{**CALL, "function": {"name": "weather", "arguments": {}}}]))


SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
FUNCTION = {"name": "weather", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    "written",
    [
        [TOOL],
        TOOL,
        json.dumps([TOOL]),
        json.dumps(TOOL),
        [json.dumps(TOOL)],
        json.dumps([json.dumps(TOOL)]),
        [FUNCTION],
        json.dumps([FUNCTION]),
        [{"type": "function", **FUNCTION}],
        [{"type": "function", "function": json.dumps(FUNCTION)}],
        [{"type": "function", "function": {**FUNCTION, "parameters": json.dumps(SCHEMA)}}],
    ],
)
def test_schemas_of_tools(written: Any) -> None:
    assert read_tools(written) == [TOOL]


@pytest.mark.parametrize("written", [None, [], "", "  ", "[]", "null"])
def test_no_tools(written: Any) -> None:
    assert read_tools(written) == []


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("weather", "field `tools` is a text, and no JSON"),
        (["weather"], r"field `tools\[0\]` is a text, and no JSON"),
        ([TOOL, 3], r"field `tools\[1\]` is int, expected an object"),
        ("3", "field `tools` is int, expected a list of objects"),
    ],
)
def test_other_tools_are_named(written: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        read_tools(written)
    assert caught.value.hint or "expected" in caught.value.message


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        ('[{"name": "f", "arguments": {"a": 1}}]', True),
        ([{"name": "f", "arguments": "{}"}], True),
        ("[]", False),
        ("4", False),
        ('[{"name": "f"}]', False),
        ('[{"name": "f", "arguments": {}, "score": 1}]', False),
        ("the answer", False),
        (None, False),
    ],
)
def test_calls_are_known_by_their_fields(value: Any, calls: bool) -> None:
    assert holds_calls(value) == calls
