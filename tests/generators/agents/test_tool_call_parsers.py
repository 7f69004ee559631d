"""Tool calls as models write them: read back, refused with a reason, never a crash."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.generators.agents.tool_call_parsers import PARSERS, choose_parser
from rollmesh.generators.agents.tool_calls import ToolCall
from rollmesh.mesh.config.rollout import ParserName
from rollmesh.mesh.errors import ConfigError

NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,10}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text("ab {}\"'\n\\é;[]", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)
Calls = list[tuple[str, dict[str, Any]]]
BAR = "\uff5c"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_hermes(calls: Calls) -> str:
    return "".join(f"\n<tool_call>\n{as_json({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def write_llama3(calls: Calls) -> str:
    return "; ".join(as_json({"name": n, "parameters": a}) for n, a in calls)


def write_mistral(calls: Calls) -> str:
    return "[TOOL_CALLS]" + as_json([{"name": n, "arguments": a, "id": "abcdefghi"} for n, a in calls])


def write_mistral_named(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{as_json(a)}" for n, a in calls)


def write_deepseek(calls: Calls) -> str:
    inner = "".join(
        f"<{BAR}tool▁call▁begin{BAR}>{n}<{BAR}tool▁sep{BAR}>{as_json(a)}<{BAR}tool▁call▁end{BAR}>" for n, a in calls
    )
    return f"<{BAR}tool▁calls▁begin{BAR}>{inner}<{BAR}tool▁calls▁end{BAR}>"


def write_deepseek_fenced(calls: Calls) -> str:
    inner = "\n".join(
        f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>{n}\n```json\n{as_json(a)}\n```<{BAR}tool▁call▁end{BAR}>"
        for n, a in calls
    )
    return f"<{BAR}tool▁calls▁begin{BAR}>{inner}<{BAR}tool▁calls▁end{BAR}>"


def write_pythonic(calls: Calls) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


WRITERS = {
    "hermes": write_hermes,
    "llama3_json": write_llama3,
    "mistral": write_mistral,
    "mistral ": write_mistral_named,
    "deepseek": write_deepseek,
    "deepseek ": write_deepseek_fenced,
    "pythonic": write_pythonic,
}
KEYWORDS = {"and", "as", "in", "is", "if", "or", "not", "for", "def", "del", "try", "from", "else", "elif", "with"}


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=15)
@given(calls=CALLS)
def test_what_is_written_is_read(form: str, calls: Calls) -> None:
    if form == "pythonic" and any({n, *a} & KEYWORDS for n, a in calls):
        return
    parsed = PARSERS[form.strip()](WRITERS[form](calls))
    assert [(call.name, call.arguments) for call in parsed.valid] == calls
    assert not parsed.errors
    assert parsed.content == ""


@settings(max_examples=15)
@given(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, st.text("ab {}1\n.", max_size=8), max_size=3)), min_size=1))
def test_values_of_the_xml_form_are_text(calls: list[tuple[str, dict[str, str]]]) -> None:
    text = "Let me see." + "".join(
        f"\n<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    )
    parsed = PARSERS["qwen3_coder"](text)
    assert parsed.calls == tuple(ToolCall(n, a, textual=True) for n, a in calls)
    assert parsed.content == "Let me see."


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "[TOOL_CALLS]",
        "[ARGS]", "[CALL_ID]", "<|python_tag|>", f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁call▁begin{BAR}>",
        f"<{BAR}tool▁sep{BAR}>", f"<{BAR}tool▁call▁end{BAR}>", '{"name": "f", "arguments": ', '{"x": 1}', "}", "[f(",
        ")]", "x=1", "{", "[", "]", '"', "function", "\n```json\n", "```", "; ", "<think>", "</think>", "1" * 5000,
        "[" * 3000,
    ]
)  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.lists(PIECES | st.text(max_size=5), max_size=8).map("".join))
def test_no_text_makes_a_parser_raise(name: ParserName, text: str) -> None:
    parsed = choose_parser(name, "")(text)
    assert all(isinstance(call, ToolCall) or call for call in parsed.calls)
    assert all(len(error) < 1000 for error in parsed.errors)


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.text("abc 123.,!?é\n", max_size=30))
def test_text_without_a_call_is_content(name: ParserName, text: str) -> None:
    parsed = choose_parser(name, "")(text)
    assert (parsed.content, parsed.calls) == (text.strip(), ())


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name": "add"', "not closed"),
        ("hermes", "<tool_call>{'name'}</tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not an object but list"),
        ("llama3_json", '{"name": "add", "parameters": {"a": }', "not valid JSON"),
        ("llama3_json", "<|python_tag|>add(1)", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]add", "[ARGS]"),
        ("mistral", '[TOOL_CALLS][{"name": "add"', "not valid JSON"),
        ("qwen3_coder", "<tool_call>add</tool_call>", "<function=NAME>"),
        ("qwen3_coder", "<tool_call><function=add>1</function></tool_call>", "outside"),
        ("deepseek", f"<{BAR}tool▁calls▁begin{BAR}>add(1)", "no call after"),
        ("deepseek", f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>add", "lacks"),
        ("pythonic", "[add(1)]", "by name"),
        ("pythonic", "[add(a=b)]", "not a literal"),
        ("pythonic", "[add(a=1", "syntax"),
    ],
)
def test_what_is_wrong_is_said(name: str, text: str, reason: str) -> None:
    [error] = PARSERS[name](text).errors
    assert reason in error


def test_the_template_tells_the_format() -> None:
    assert choose_parser("auto", "... <tool_call>\n{name} ...")(write_hermes([("f", {})])).calls
    assert choose_parser("auto", "<tool_call><function=")("<tool_call><function=f></function></tool_call>").calls == (
        ToolCall("f", {}, textual=True),
    )
    assert choose_parser("auto", "'[TOOL_CALLS]'")(write_mistral([("f", {})])).calls
    for foreign in ("<tool_call>{name}\n<arg_key>{key}</arg_key>", "<seed:tool_call>\n<function=f>"):
        with pytest.raises(ConfigError, match="no parser reads"):
            choose_parser("auto", foreign)
    with pytest.raises(ConfigError, match="does not show"):
        choose_parser("auto", "{{ messages }}")


def test_the_configuration_knows_every_parser() -> None:
    assert set(get_args(ParserName)) == {"auto", *PARSERS}


def _repeated(count: int) -> list[str]:
    """Texts as a model writes them that repeats itself."""
    return [
        "<tool_call><function=f>" + "<parameter=x>" * count + "</function></tool_call>",
        "<tool_call><function=f>" + "<parameter=" * count + "</function></tool_call>",
        "<tool_call><function=f>" + "</function>" * count + " " * count,
        "<tool_call>" * count,
        "{};" * count,
        '<|python_tag|>{"name": "f"}' + "; " * count,
        f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>f<{BAR}tool▁sep{BAR}>```{' ' * count}x"
        f"<{BAR}tool▁call▁end{BAR}>",
        "[TOOL_CALLS]" * count,
        "[" + " " * count + "f",
        *(
            piece * count
            for piece in (
                "{",
                '{"a":',
                '<tool_call>{"a":"',
                "[f(",
                "[f('",
                '{"name": "f", "parameters": ',
                "</think>",
                "<think>",
            )
        ),
        "<tool_call><function=f><parameter=x>" * count + "</parameter></function>",
    ]


@pytest.mark.parametrize("name", get_args(ParserName)[1:])
def test_what_a_model_repeats_without_end_is_read_in_no_time(name: ParserName) -> None:
    """Four times the text takes four times the processor time: sixteen times, if that grew with the square."""
    parse, count = choose_parser(name, ""), 4_000
    for less, more in zip(_repeated(count), _repeated(4 * count), strict=True):
        begin = time.process_time()
        parse(less)
        middle = time.process_time()
        parse(more)
        # Where both are read in no time, their ratio means nothing.
        assert time.process_time() - middle < 10 * (middle - begin) + 0.5, less[:80]


@pytest.mark.parametrize("repeated", ["a.", "-", "(", "[", "not ", "1+", "f(x="])
def test_calls_nested_without_end_make_no_parser_raise(repeated: str) -> None:
    for depth in (50, 300, 900, 100_000):
        assert choose_parser("pythonic", "")(f"[f(x=1), {repeated * depth}g(x=1)]").calls
