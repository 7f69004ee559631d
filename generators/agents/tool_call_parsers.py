"""The formats in which models write tool calls: pure functions from a turn's text to its content and calls.

Invariants: no text makes a parser raise, nor take longer than its length allows for. Text that only looks like a call
becomes an error that names the mistake. Text without a call is content, unchanged but for white space around it. A
model's thoughts (up to the last `</think>`) are content and never a call. Text comes with special tokens, without the
one that ended the turn.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from rollmesh.generators.agents.tool_calls import ParsedTurn, ToolCall
from rollmesh.mesh.config.rollout import ParserName
from rollmesh.mesh.errors import ConfigError

Parser = Callable[[str], ParsedTurn]
_Found = ToolCall | str
_SHOWN = 120

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_FUNCTION, _FUNCTION_END = re.compile(r"<function=([^<>\n]+)>"), "</function>"
_PARAMETER, _PARAMETER_END = re.compile(r"<parameter=([^<>\n]+)>"), "</parameter>"
# With the full-width bar of DeepSeek's special tokens.
_DEEP_ALL, _DEEP_ALL_END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
_DEEP_ONE, _DEEP_ONE_END = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>"
_DEEP_SEP = "<\uff5ctool▁sep\uff5c>"
_FENCE = "```"
_BETWEEN = re.compile(r"[; \n\t]*")
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


def hermes(text: str) -> ParsedTurn:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""
    content, blocks = _blocks(text)
    return ParsedTurn(content, tuple(block if error else _json_call(block) for block, error in blocks))


def qwen3_coder(text: str) -> ParsedTurn:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5)."""
    content, blocks = _blocks(text)
    return ParsedTurn(content, tuple(block if error else _xml_call(block) for block, error in blocks))


def llama3_json(text: str) -> ParsedTurn:
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, perhaps after `<|python_tag|>` (Llama 3)."""
    before, tag, body = text.partition(_PYTHON_TAG)
    if not tag:
        before, body = "", text.strip()
        if not body.startswith("{"):
            return ParsedTurn(body)
    found: list[_Found] = []
    decoder, place = json.JSONDecoder(), 0
    body = body.strip()
    while place < len(body):
        try:
            value, place = decoder.raw_decode(body, place)
        except (ValueError, RecursionError) as error:
            found.append(_not_json(body[place:], error))
            break
        found.append(_call_of(value))
        between = _BETWEEN.match(body, place)
        place = between.end() if between else place
    if not tag and '"name"' not in body:
        # An answer in JSON.
        return ParsedTurn(body)
    return ParsedTurn(before.strip(), tuple(found))


def mistral(text: str) -> ParsedTurn:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]NAME[ARGS]{...}` of later tokenizers."""
    content, *segments = text.split(_TOOL_CALLS)
    found: list[_Found] = []
    for segment in map(str.strip, segments):
        if not segment.startswith(("[{", "[ ", "[\n", "[]", "{")):
            found.append(_named_call(segment))
            continue
        try:
            value = json.loads(segment)
        except (ValueError, RecursionError) as error:
            found.append(_not_json(segment, error))
            continue
        found.extend(map(_call_of, value if isinstance(value, list) else [value]))
    return ParsedTurn(content.strip(), tuple(found))


def deepseek(text: str) -> ParsedTurn:
    """`BEGIN NAME SEP {...} END` in special tokens (V3.1), also with `function` and a code fence (V3, R1)."""
    content, _, rest = text.partition(_DEEP_ALL)
    found: list[_Found] = []
    for segment in rest.partition(_DEEP_ALL_END)[0].split(_DEEP_ONE)[1:]:
        body, end, _ = segment.partition(_DEEP_ONE_END)
        name, sep, arguments = body.partition(_DEEP_SEP)
        if not end or not sep:
            found.append(f"a call lacks {_DEEP_ONE_END if sep else _DEEP_SEP}: {_shown(body)}")
            continue
        if name.strip() == "function" and "\n" in arguments:
            name, _, arguments = arguments.partition("\n")
        found.append(_with_arguments(name.strip(), _unfenced(arguments.strip())))
    if rest and not found:
        found.append(f"no call after {_DEEP_ALL}")
    return ParsedTurn(content.strip(), tuple(found))


def pythonic(text: str) -> ParsedTurn:
    """`[name(key=value), ...]` with literal values (Llama 4, small Llama 3.2, ToolACE)."""
    body = text.replace("<|python_start|>", "").replace("<|python_end|>", "").strip()
    if not _PYTHONIC.match(body):
        return ParsedTurn(body)
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ParsedTurn("", (f"not a list of calls in Python's syntax: {error}",))
    if not isinstance(tree, ast.List):
        return ParsedTurn("", (f"not a list of calls: {_shown(body)}",))
    return ParsedTurn("", tuple(map(_python_call, tree.elts)))


PARSERS: dict[ParserName, Parser] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "qwen3_coder": qwen3_coder,
    "deepseek": deepseek,
    "pythonic": pythonic,
}
# Marks in a chat template that speaks of tools, the most specific first.
_TRACES: tuple[tuple[str, ParserName], ...] = (
    ("<function=", "qwen3_coder"),
    (_TOOL_CALLS, "mistral"),
    ("tool▁call▁begin", "deepseek"),
    (_OPEN, "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters"', "llama3_json"),
)


def choose_parser(name: ParserName, template: str) -> Parser:
    """The parser of a name; `auto`: by the marks in the chat template.

    Raises:
        ConfigError: the template does not say which.
    """
    found = next((known for trace, known in _TRACES if trace in template), None) if name == "auto" else name
    if found is None:
        raise ConfigError(
            "the chat template does not show how the model writes tool calls",
            hint=f"set rollout.agent.parser to one of: {', '.join(PARSERS)}",
        )
    parser = PARSERS[found]
    return lambda text: _without_thoughts(parser, text)


def _without_thoughts(parser: Parser, text: str) -> ParsedTurn:
    thoughts, end, said = text.rpartition("</think>")
    if "<think>" in said:
        return ParsedTurn(text)
    parsed = parser(said)
    return ParsedTurn(thoughts + end + parsed.content, parsed.calls) if end else parsed


def _blocks(text: str) -> tuple[str, list[tuple[str, bool]]]:
    """The text outside of `<tool_call>` blocks, and (what is inside, or what is wrong, whether it is wrong) of each."""
    first, *pieces = text.split(_OPEN)
    outside = [first]
    blocks: list[tuple[str, bool]] = []
    for piece in pieces:
        body, end, rest = piece.partition(_CLOSE)
        blocks.append((body, False) if end else (f"{_OPEN} is not closed by {_CLOSE}: {_shown(body)}", True))
        outside.append(rest)
    return "".join(outside).strip(), blocks


def _json_call(text: str) -> _Found:
    try:
        return _call_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        return _not_json(text, error)


def _call_of(value: Any) -> _Found:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return f'a call is an object with "name" and "arguments", not {type(value).__name__}'
    arguments = value.get("arguments", value.get("parameters", {}))
    call_id = value.get("id")
    return _with_arguments(value["name"], arguments, call_id if isinstance(call_id, str) else "")


def _with_arguments(name: str, arguments: Any, call_id: str = "") -> _Found:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"the arguments of {name!r} are {_not_json(arguments, error)}"
    if not isinstance(arguments, dict):
        return f"the arguments of {name!r} are not an object but {type(arguments).__name__}"
    return ToolCall(name, arguments, call_id)


def _named_call(text: str) -> _Found:
    place = text.find("{")
    if place < 0:
        return f"a call is NAME{_ARGS}{{...}}, not {_shown(text)}"
    name, _, call_id = text[:place].removesuffix(_ARGS).partition(_CALL_ID)
    return _with_arguments(name.strip(), text[place:], call_id.strip())


def _xml_call(text: str) -> _Found:
    text = text.strip()
    match = _FUNCTION.match(text)
    if match is None or not text.endswith(_FUNCTION_END, match.end()):
        return f"a call is <function=NAME> ... </function>, not {_shown(text)}"
    name, body = match[1].strip(), text[match.end() : -len(_FUNCTION_END)]
    arguments, rest, place = {}, [], 0
    while opened := _PARAMETER.search(body, place):
        end = body.find(_PARAMETER_END, opened.end())
        if end < 0:
            break
        rest.append(body[place : opened.start()])
        arguments[opened[1].strip()] = _without_outer_newlines(body[opened.end() : end])
        place = end + len(_PARAMETER_END)
    outside = "".join([*rest, body[place:]]).strip()
    if outside:
        return f"{name!r} has something outside of <parameter=KEY> ... </parameter>: {_shown(outside)}"
    return ToolCall(name, arguments, textual=True)


def _unfenced(text: str) -> str:
    inside = text.removeprefix(_FENCE).removesuffix(_FENCE)
    return inside.removeprefix("json").strip() if len(text) - len(inside) == 2 * len(_FENCE) else text


def _without_outer_newlines(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _python_call(node: ast.expr) -> _Found:
    try:
        name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    except RecursionError:
        return "a call that is nested too deep"
    if not isinstance(node, ast.Call):
        return f"not a call: {_shown(name)}"
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return f"{name}: arguments go by name"
    try:
        arguments = dict(_literals(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return f"{name}: an argument is not a literal"
    return ToolCall(name, arguments)


def _literals(node: ast.Call) -> Iterator[tuple[str, Any]]:
    for keyword in node.keywords:
        assert keyword.arg is not None, "checked before"
        yield keyword.arg, ast.literal_eval(keyword.value)


def _not_json(text: str, error: Exception) -> str:
    return f"not valid JSON ({error}): {_shown(text)}"


def _shown(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + " ...")
