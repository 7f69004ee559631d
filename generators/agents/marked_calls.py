"""Calls between marks of their own: JSON after Hermes, Mistral and DeepSeek.

Each function takes a turn's text and returns a reader for `turn_scanner.scan`. Invariant: JSON is read to its own end,
so that arguments may hold any mark.
"""

from __future__ import annotations

import re

from rollmesh.generators.agents.turn_scanner import (
    Found,
    Marks,
    Reader,
    Reading,
    call_of,
    not_json,
    read_json,
    shown,
    skip_space,
    with_arguments,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BLOCK = re.compile(f"{OPEN}|{CLOSE}")
TOOL_CALLS, _CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
# With the full-width bar of DeepSeek's special tokens.
DEEP_ALL, DEEP_ALL_END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
DEEP_ONE, DEEP_ONE_END = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>"
DEEP_SEP = "<\uff5ctool▁sep\uff5c>"
_DEEP = re.compile("|".join(map(re.escape, (DEEP_ALL, DEEP_ALL_END, DEEP_ONE, DEEP_ONE_END, DEEP_SEP))))
_FENCE = re.compile(r"```(?:json)?")


def hermes(text: str) -> Reader:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""
    blocks = Marks(BLOCK, text)

    def read(mark: re.Match[str]) -> Reading:
        try:
            value, end = read_json(text, mark.end())
        except (ValueError, RecursionError) as error:
            return unread_block(text, blocks, mark, mark.end(), str(error))
        closing = skip_space(text, end)
        if text.startswith(CLOSE, closing):
            return Reading(closing + len(CLOSE), (call_of(value),))
        return unread_block(text, blocks, mark, end, "there is more after it")

    return read


def unread_block(text: str, blocks: Marks, mark: re.Match[str], place: int, error: str, form: str = "JSON") -> Reading:
    """The error of a block that cannot be read; it goes as far as the next mark.

    Args:
        text: of the turn.
        blocks: marks in it.
        mark: opens the block.
        place: in the block: marks before it belong to it.
        error: is said where the block is closed.
        form: that it should have.
    """
    following = blocks.after(place)
    if following is None or following[0] == OPEN:
        end = following.start() if following else len(text)
        return Reading(end, (f"{OPEN} is not closed by {CLOSE}: {shown(text[mark.end() : end])}",))
    body = shown(text[mark.end() : following.start()])
    return Reading(following.end(), (f"not valid {form} ({error}): {body}",))


def mistral(text: str) -> Reader:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]NAME[ARGS]{...}` of later tokenizers."""
    marks = Marks(re.compile(re.escape(TOOL_CALLS)), text)

    def read(mark: re.Match[str]) -> Reading:
        following = marks.after(mark.end())
        stop = following.start() if following else len(text)
        place = skip_space(text, mark.end())
        is_named = not text.startswith(("[", "{"), place) or text.startswith((TOOL_CALLS, ARGS, _CALL_ID), place)
        name, call_id = "", ""
        if is_named:
            begin = text.find("{", place, stop)
            if begin < 0:
                return Reading(stop, (f"a call is NAME{ARGS}{{...}}, not {shown(text[place:stop])}",))
            name, _, call_id = text[place:begin].strip().removesuffix(ARGS).partition(_CALL_ID)
            place = begin
        try:
            value, end = read_json(text, place)
        except (ValueError, RecursionError) as error:
            return Reading(stop, (not_json(text[place:stop], error),))
        if is_named:
            return Reading(end, (with_arguments(name.strip(), value, call_id.strip()),))
        return Reading(end, tuple(map(call_of, value if isinstance(value, list) else [value])))

    return read


def deepseek(text: str) -> Reader:
    """`BEGIN NAME SEP {...} END` in special tokens (V3.1), also with `function` and a code fence (V3, R1)."""
    marks = Marks(_DEEP, text)

    def read(mark: re.Match[str]) -> Reading:
        found: list[Found] = []
        place = mark.end()
        while (following := marks.after(place)) is not None and following[0] != DEEP_ALL_END:
            place = following.end()
            if following[0] == DEEP_ONE:
                call, place = _deep_call(text, marks, place)
                found.append(call)
        end = following.end() if following else len(text)
        return Reading(end, tuple(found) or (f"no call after {DEEP_ALL}",))

    return read


def _deep_call(text: str, marks: Marks, begin: int) -> tuple[Found, int]:
    """One call after its mark, and where it ends."""
    separator = marks.after(begin)
    if separator is None or separator[0] != DEEP_SEP:
        end = separator.start() if separator else len(text)
        return f"a call lacks {DEEP_SEP}: {shown(text[begin:end])}", end
    name, place = text[begin : separator.start()].strip(), separator.end()
    following = marks.after(place)
    stop = following.start() if following else len(text)
    line = text.find("\n", place, stop)
    if name == "function" and line >= 0:
        name, place = text[place:line].strip(), line
    fence = _FENCE.match(text, skip_space(text, place))
    try:
        arguments, end = read_json(text, fence.end() if fence else place)
    except (ValueError, RecursionError) as error:
        if following is None or following[0] != DEEP_ONE_END:
            return f"a call lacks {DEEP_ONE_END}: {shown(text[begin:stop])}", stop
        return f"the arguments of {name!r} are {not_json(text[place:stop], error)}", following.end()
    end = skip_space(text, end)
    if fence and text.startswith("```", end):
        end = skip_space(text, end + 3)
    if not text.startswith(DEEP_ONE_END, end):
        return f"a call lacks {DEEP_ONE_END}: {shown(text[begin:end])}", end
    return with_arguments(name, arguments), end + len(DEEP_ONE_END)
