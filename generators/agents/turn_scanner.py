"""Finds the calls of tools in a turn: what is thought, what is said, and what is a call.

Invariants: the turn is read once, from its beginning. A call is read to its own end before anything else is looked
for, so that marks within its arguments are text. Thoughts are content and hold no call, whether the prompt or the model
has opened them. Thoughts that nothing closes continue to the end of the turn.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.agents.tool_calls import ParsedTurn, ToolCall
from rollmesh.mesh.chat.thoughts import THOUGHT_MARKS, thoughts_end

Found = ToolCall | str
_SHOWN = 120
# Characters of a value that are read first, and those at their end where an error may come of the cut.
_WINDOW, _EDGE = 1024, 16
_BEGINNINGS = "|".join(re.escape(opening) for opening, _ in THOUGHT_MARKS)
_ENDS = re.compile("|".join(re.escape(closing) for _, closing in THOUGHT_MARKS))
_SPACE = re.compile(r"\s*")
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Reading:
    """The reading of what may be a call.

    Attributes:
        end: where the reading of the turn continues.
        found: calls, or what is wrong with them; empty: it is text.
    """

    end: int
    found: tuple[Found, ...] = ()


Reader = Callable[[re.Match[str]], Reading]


class Marks:
    """The places of a mark in a text.

    Args:
        pattern: of the mark.
        text: that is searched, once.
    """

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._matches = list(pattern.finditer(text))
        self._starts = [match.start() for match in self._matches]

    def after(self, place: int) -> re.Match[str] | None:
        """The first one that begins at a place or after it."""
        index = bisect_left(self._starts, place)
        return self._matches[index] if index < len(self._matches) else None


def scan(text: str, opened: bool, opening: re.Pattern[str], read: Reader) -> ParsedTurn:
    """The content and the calls of a turn.

    Args:
        text: of the turn.
        opened: the prompt has opened thoughts.
        opening: matches where a call may begin.
        read: reads it from there.
    """
    marks = re.compile(f"{_BEGINNINGS}|{_ENDS.pattern}|(?P<call>{opening.pattern})")
    outside: list[tuple[int, int]] = []
    found: list[Found] = []
    begin = place = 0
    if opened:
        end = _ENDS.search(text)
        place = end.end() if end else len(text)
    while mark := marks.search(text, place):
        if mark["call"] is not None:
            reading = read(mark)
            if reading.found:
                outside.append((begin, mark.start()))
                found.extend(reading.found)
                begin = reading.end
            place = reading.end
        elif closing := thoughts_end(mark[0]):
            end_at = text.find(closing, mark.end())
            place = end_at + len(closing) if end_at >= 0 else len(text)
        else:
            # An end without a beginning: all before it was thought.
            outside, found, begin, place = [], [], 0, mark.end()
    pieces = [text[first:last] for first, last in (*outside, (begin, len(text)))]
    return ParsedTurn("".join(pieces).strip(), tuple(found))


def skip_space(text: str, place: int) -> int:
    """The first place that is no white space."""
    match = _SPACE.match(text, place)
    return match.end() if match else place


def read_json(text: str, place: int) -> tuple[Any, int]:
    """The JSON value that begins at a place, after white space, and where it ends.

    Raises:
        JSONDecodeError: there is none; its position counts from where the value begins.
        ValueError, RecursionError: Python cannot hold it.
    """
    begin, width = skip_space(text, place), _WINDOW
    # An error of the whole text would cost its length.
    while begin + width < len(text):
        part = text[begin : begin + width]
        try:
            value, end = _decode(part)
        except json.JSONDecodeError as error:
            if error.pos < width - _EDGE and not error.msg.startswith("Unterminated string"):
                raise
        else:
            if end < width:
                return value, begin + end
        width *= 4
    value, end = _decode(text[begin:])
    return value, begin + end


def call_of(value: Any) -> Found:
    """The call of an object with `name` and `arguments` or `parameters`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return f'a call is an object with "name" and "arguments", not {type(value).__name__}'
    call_id = value.get("id")
    arguments = value.get("arguments", value.get("parameters", {}))
    return with_arguments(value["name"], arguments, call_id if isinstance(call_id, str) else "")


def with_arguments(name: str, arguments: Any, call_id: str = "") -> Found:
    """The call of a tool with arguments, an object or its JSON text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"the arguments of {name!r} are {not_json(arguments, error)}"
    if arguments is None:
        # A tool without any.
        return ToolCall(name, {}, call_id)
    if not isinstance(arguments, dict):
        return f"the arguments of {name!r} are not an object but {type(arguments).__name__}"
    return ToolCall(name, arguments, call_id)


def not_json(text: str, error: Exception) -> str:
    """Says that a text is no JSON."""
    return f"not valid JSON ({error}): {shown(text)}"


def shown(text: str) -> str:
    """The beginning of a text, quoted."""
    text = text.strip()
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + " ...")
