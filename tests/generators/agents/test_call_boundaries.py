"""Where calls begin and end: thoughts, text around them, and arguments that hold any text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.agents.tool_call_parsers import PARSERS
from rollmesh.generators.agents.tool_calls import ToolCall
from rollmesh.mesh.chat.thoughts import THOUGHT_MARKS, after_thoughts
from tests.generators.agents.test_tool_call_parsers import BAR, WRITERS, Calls

NAMES = ("f", "g")
Parsed = list[tuple[str, Any]]


def write_qwen3_coder(calls: Calls) -> str:
    return "".join(
        f"\n<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


FORMS = {**WRITERS, "qwen3_coder": write_qwen3_coder}
# Pieces of every form, whole and in halves.
TAGS = [
    *(mark for marks in THOUGHT_MARKS for mark in marks),
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<function=f>", "</function>", "<|python_tag|>", "<|python_start|>", "{", "}", "[", "]", '"', "'", "\\", ")",
    "[f(x=1)]", '{"name": "f", "parameters": {}}', '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "```",
    "```json", "\n", ";", f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁call▁end{BAR}>", f"<{BAR}tool▁sep{BAR}>",
    f"<{BAR}tool▁calls▁end{BAR}>",
]  # fmt: skip
ANY_TEXT = st.lists(st.sampled_from(TAGS) | st.text("ab é", max_size=3), max_size=6).map("".join)


def parse(form: str, text: str, **options: Any) -> tuple[Parsed, str]:
    """The calls and the content of a turn; nothing of it is an error."""
    parsed = PARSERS[form.strip()](text, names=NAMES, **options)  # type: ignore[index]
    assert not parsed.errors
    return [(call.name, call.arguments) for call in parsed.valid], parsed.content


@pytest.mark.parametrize("form", FORMS)
@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.fixed_dictionaries({"x": ANY_TEXT, "y": ANY_TEXT})), min_size=1, max_size=2
    )
)
def test_arguments_hold_any_text(form: str, calls: Calls) -> None:
    assert parse(form, FORMS[form](calls)) == (calls, "")


@pytest.mark.parametrize("form", FORMS)
@given(ANY_TEXT.filter(lambda text: after_thoughts(text) == text), st.booleans())
def test_thoughts_hold_no_call(form: str, thought: str, again: bool) -> None:
    call = FORMS[form]([("f", {"x": "1"})])
    thoughts = f"{thought} {call}"
    for opened, text in ((True, thoughts), (False, f"<think>{thoughts}")):
        assert parse(form, text, opened=opened)[0] == []
        said = f"{text}</think>So.{call}" + ("And." if again else "")
        assert parse(form, said, opened=opened)[0] == [("f", {"x": "1"})]


@pytest.mark.parametrize("form", FORMS)
def test_thoughts_come_back_in_the_content(form: str) -> None:
    call = FORMS[form]([("f", {"x": "1"})]).strip()
    assert parse(form, f"a{call}</think>b{call}c", opened=True) == ([("f", {"x": "1"})], f"a{call}</think>bc")
    assert parse(form, f"[THINK]a{call}[/THINK]b{call}")[1] == f"[THINK]a{call}[/THINK]b"
    # The model thinks again, and of a call; a template opened the first thoughts and its prompt was not known.
    assert parse(form, f"{call}<think>{call}</think>{call}")[0] == [("f", {"x": "1"})] * 2
    assert parse(form, f"a{call}</think>{call}")[0] == [("f", {"x": "1"})]
    assert parse(form, f"a{call}", opened=True) == ([], f"a{call}")


@pytest.mark.parametrize("form", FORMS)
def test_text_stands_around_calls(form: str) -> None:
    one = FORMS[form]([("f", {"x": "1"})]).strip()
    two = FORMS[form]([("f", {"x": "1"}), ("g", {"y": "2"})]).strip()
    assert parse(form, f"I look.\n\n{one}\n\nAnything else?") == (
        [("f", {"x": "1"})],
        "I look.\n\n\n\nAnything else?",
    )
    assert parse(form, f"{two} done") == ([("f", {"x": "1"}), ("g", {"y": "2"})], "done")
    assert parse(form, f"{one} and {one}") == ([("f", {"x": "1"})] * 2, "and")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Alice", "age": 3}',
        '{"name": "f", "age": 3}',
        '{"name": "Alice", "arguments": {"age": 3}}',
        '{"name": "Alice", "parameters": [1]}',
        'Here: {"person": {"name": "f", "arguments": {}}}',
        '[{"name": "Alice"}, {"name": "Bob"}]',
        '[{"name": "f", "parameters": {}}, {"name": "Bob", "age": 3}]',
        '{"name": "Alice", "age": ',
        '{"name": "Alice", "parameters": {"a": }',
        "if (x) { return; }",
        "{" * 50,
        "[]",
        "[ {",
    ],
)
def test_answers_in_json_are_no_calls(text: str) -> None:
    assert parse("llama3_json", text) == ([], text.strip())


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "name": "f", "parameters": {"x": "1"}}',
        '{"name": "f", "parameters": {"x": "1"}};',
        '<|python_tag|>{"name": "f", "parameters": {"x": "1"}}; ',
        '[{"name": "f", "arguments": {"x": "1"}}]',
        '{"name": "f", "parameters": "{\\"x\\": \\"1\\"}"}',
        'if (x) { y } else {"a": 1} {"name": "f", "parameters": {"x": "1"}}',
        '{"a": 1, then {"name": "f", "parameters": {"x": "1"}}',
        '```json\n{"name": "f", "parameters": {"x": "1"}}\n```',
        '<|python_tag|>{"name": "f", "parameters": {"x": "1"}}\n\nAnything else?',
    ],
)
def test_llama_writes_its_call_in_many_ways(text: str) -> None:
    assert parse("llama3_json", text)[0] == [("f", {"x": "1"})]


def test_a_tool_without_arguments_is_called_with_null() -> None:
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>')[0] == [("f", {})]
    assert parse("llama3_json", '{"name": "f", "parameters": null}')[0] == [("f", {})]


def test_after_its_tag_a_call_may_name_anything() -> None:
    assert parse("llama3_json", '<|python_tag|>{"name": "unknown"}')[0] == [("unknown", {})]


@pytest.mark.parametrize("text", ["see [1] and [h(x=1)]", "[h(x) for x in y]", "a[f] = [g]", "[note (f)]"])
def test_lists_of_other_things_are_no_calls(text: str) -> None:
    assert parse("pythonic", text) == ([], text)


def test_python_and_json_are_mixed_in_literals() -> None:
    text = "Now. <|python_start|>[f(x=true, y=[None, false], z=(1, -2)), g()]<|python_end|> Done."
    assert parse("pythonic", text) == ([("f", {"x": True, "y": [None, False], "z": [1, -2]}), ("g", {})], "Now.  Done.")
    assert parse("pythonic", "<|tool_call_start|>[g()]<|tool_call_end|>So.") == ([("g", {})], "So.")
    for value in ("{1}", "b'a'", "1j", "1e999", "x", "...", "f(1)"):
        [error] = PARSERS["pythonic"](f"[f(x={value})]").errors
        assert error == "f: an argument is not a literal"


@pytest.mark.parametrize(
    ("value", "others"),
    [
        ("a</parameter>b", {}),
        ("write <parameter=x> here", {}),
        ("write <parameter=x> here", {"b": "2"}),
        ("<parameter=x>\n1\n</parameter>", {"b": "2"}),
        (write_qwen3_coder([("g", {"x": "1"})]).strip(), {"b": "</function>\n</tool_call>"}),
        ("\n two \n", {}),
    ],
)
def test_a_text_argument_may_hold_the_tags_of_its_form(value: str, others: dict[str, str]) -> None:
    calls: Calls = [("f", {"a": value, **others}), ("g", {"c": "3"})]
    assert parse("qwen3_coder", write_qwen3_coder(calls)) == (calls, "")


@pytest.mark.parametrize(
    ("form", "text", "reasons", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f"<tool_call>{"name": "g"}</tool_call>', ["not closed"], ["g"]),
        ("hermes", '<tool_call>{"name": "f"}{}</tool_call>after', ["more after it"], []),
        ("hermes", "<tool_call></tool_call>", ["not valid JSON"], []),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=x>1" + write_qwen3_coder([("g", {"x": "2"})]),
            ["not closed"],
            ["g"],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1</parameter> and <parameter=b>2</parameter></function></tool_call>",
            ["outside"],
            [],
        ),
        ("qwen3_coder", "<tool_call><function=f></function>more</tool_call>", ["something after"], []),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": }[TOOL_CALLS]g[ARGS]{}', ["not valid JSON"], ["g"]),
        ("llama3_json", 'So {"name": "f", "parameters": {"x": }}', ["not valid JSON"], []),
        ("pythonic", "So [f(x=1", ["not closed"], []),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_read_are_errors(form: str, text: str, reasons: list[str], calls: list[str]) -> None:
    parsed = PARSERS[form](text, names=NAMES)  # type: ignore[index]
    assert [call.name for call in parsed.valid] == calls
    for error, reason in zip(parsed.errors, reasons, strict=True):
        assert reason in error


def test_a_call_has_the_id_that_the_model_gave() -> None:
    [call] = PARSERS["mistral"]('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"x": 1}').calls
    assert call == ToolCall("f", {"x": 1}, "abc123def")
    [call] = PARSERS["mistral"](f"[TOOL_CALLS]{json.dumps([{'name': 'f', 'arguments': {}, 'id': 'abc123def'}])}").calls
    assert call == ToolCall("f", {}, "abc123def")
