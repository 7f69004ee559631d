"""Calls that look like other text: Llama's JSON and lists in Python's syntax.

Each function takes a turn's text and the names of the tools, and returns a reader for `turn_scanner.scan`. Invariants:
what names no tool is text. An answer in JSON is text too, unless it has a tool's name and arguments, and so is any
object within it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from rollmesh.generators.agents.python_literals import read_literal
from rollmesh.generators.agents.tool_calls import ToolCall
from rollmesh.generators.agents.turn_scanner import Found, Reader, Reading, call_of, not_json, read_json, shown

Names = Collection[str] | None
PYTHON_TAG = "<|python_tag|>"
LLAMA_OPENING = re.compile(rf"{re.escape(PYTHON_TAG)}|\{{|\[(?=\s*\{{)")
PYTHONIC_OPENING = re.compile(r"\[\s*(?=(?P<name>[A-Za-z_][\w.]*)\()")
PYTHONIC_TAGS = re.compile(r"<\|(?:python|tool_call)_(?:start|end)\|>")
_BETWEEN = re.compile(r"[; \n\t]*")
# The beginning of a call, where the rest of it is no JSON.
_BEGUN_CALL = re.compile(
    r'(?:\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:parameters|arguments)"\s*:'
)
_PYTHON_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' r"'''(?:\\.|[^\\])*?'''|" r'"(?:\\.|[^"\\])*"|' r"'(?:\\.|[^'\\])*'|" r"[\"'()\[\]{}]",
    re.DOTALL,
)


def llama3_json(text: str, names: Names) -> Reader:
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, perhaps after `<|python_tag|>` (Llama 3)."""

    def read(mark: re.Match[str]) -> Reading:
        return _after_tag(text, mark.end()) if mark[0] == PYTHON_TAG else _json_calls(text, mark.start(), names)

    return read


def _after_tag(text: str, place: int) -> Reading:
    """The calls after a tag, which says that they are some whatever they name."""
    found: list[Found] = []
    end = place
    while (place := _after_separators(text, end)) < len(text) and (not found or text[place] in "[{"):
        try:
            value, end = read_json(text, place)
        except (ValueError, RecursionError) as error:
            return Reading(len(text), (*found, not_json(text[place:], error)))
        found.extend(map(call_of, value if isinstance(value, list) else [value]))
    return Reading(place if place == len(text) else end, tuple(found))


def _json_calls(text: str, begin: int, names: Names) -> Reading:
    found: list[Found] = []
    end = place = begin
    while text.startswith(("{", "["), place):
        try:
            value, after = read_json(text, place)
        except json.JSONDecodeError as error:
            if _is_begun_call(text, place, names):
                return Reading(len(text), (*found, not_json(text[place:], error)))
            # The text read so far is part of a broken value: no call begins in it.
            return Reading(end, tuple(found)) if found else Reading(begin + max(error.pos, 1))
        except ValueError:
            return Reading(end if found else begin + 1, tuple(found))
        except RecursionError:
            return Reading(end if found else len(text), tuple(found))
        values = value if isinstance(value, list) else [value]
        if not values or not all(_is_call(value, names) for value in values):
            return Reading(end if found else after, tuple(found))
        found.extend(map(call_of, values))
        end, place = after, _after_separators(text, after)
    return Reading(place if place == len(text) else end, tuple(found))


def _after_separators(text: str, place: int) -> int:
    between = _BETWEEN.match(text, place)
    return between.end() if between else place


def _is_call(value: Any, names: Names) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return _is_known(value["name"], names) and ("parameters" in value or "arguments" in value)


def _is_begun_call(text: str, place: int, names: Names) -> bool:
    begun = _BEGUN_CALL.match(text, place)
    return begun is not None and _is_known(begun[1], names)


def _is_known(name: str, names: Names) -> bool:
    return names is None or name in names


def pythonic(text: str, names: Names) -> Reader:
    """`[name(key=value), ...]` with literal values (Llama 4, small Llama 3.2, LFM2, ToolACE)."""

    def read(mark: re.Match[str]) -> Reading:
        if not _is_known(mark["name"], names):
            return Reading(mark.end())
        end = _list_end(text, mark.start())
        if end is None:
            rest = shown(text[mark.start() :])
            return Reading(len(text), (f"not a list of calls in Python's syntax: it is not closed: {rest}",))
        body = text[mark.start() : end]
        try:
            tree = ast.parse(body, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return Reading(end, (f"not a list of calls in Python's syntax: {error}",))
        if not isinstance(tree, ast.List):
            return Reading(end, (f"not a list of calls: {shown(body)}",))
        return Reading(end, tuple(map(_python_call, tree.elts)))

    return read


def _list_end(text: str, begin: int) -> int | None:
    """The end of the list that begins at a place; brackets in strings are none. None: it has no end."""
    depth = 0
    for token in _PYTHON_TOKEN.finditer(text, begin):
        if token[0] in ("'", '"'):
            return None
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if not depth:
            return token.end()
    return None


def _python_call(node: ast.expr) -> Found:
    try:
        name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    except RecursionError:
        return "a call that is nested too deep"
    if not isinstance(node, ast.Call):
        return f"not a call: {shown(name)}"
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None or node.args:
            break
        try:
            arguments[keyword.arg] = read_literal(keyword.value)
        except ValueError:
            return f"{name}: an argument is not a literal"
    if node.args or len(arguments) < len(node.keywords):
        return f"{name}: arguments go by name"
    return ToolCall(name, arguments)
