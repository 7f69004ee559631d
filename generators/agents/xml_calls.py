"""Calls whose arguments are text between tags (Qwen3-Coder, Qwen3.5).

The form has no way to quote a tag, and arguments may hold any text. So a value ends at the `</parameter>` that closes
its own tag, tags within it being counted. Another argument or the end of the function has to follow. Where a value has
half a pair of tags, it ends at the first `</parameter>` that has such a follower.
"""

from __future__ import annotations

import re

from rollmesh.generators.agents.marked_calls import BLOCK, CLOSE, OPEN, unread_block
from rollmesh.generators.agents.tool_calls import ToolCall
from rollmesh.generators.agents.turn_scanner import Marks, Reader, Reading, skip_space

_FUNCTION, _FUNCTION_END = re.compile(r"<function=([^<>\n]+)>"), "</function>"
_PARAMETER, _PARAMETER_END = re.compile(r"<parameter=([^<>\n]+)>"), "</parameter>"
_TAG = re.compile(f"{_PARAMETER.pattern}|{_PARAMETER_END}")
# Such an end stands where the form allows one.
_ENDING = re.compile(rf"{_PARAMETER_END}(?=\s*(?:{_PARAMETER.pattern}|{_FUNCTION_END}))")


class _UnreadableError(Exception):
    """The function cannot be read.

    Attributes:
        place: as far as it could be.
    """

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


def qwen3_coder(text: str) -> Reader:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`; see `marked_calls`."""
    blocks, values = Marks(BLOCK, text), _Values(text)

    def read(mark: re.Match[str]) -> Reading:
        try:
            call, end = _function(text, skip_space(text, mark.end()), values)
            closing = skip_space(text, end)
            if text.startswith(CLOSE, closing):
                return Reading(closing + len(CLOSE), (call,))
            raise _UnreadableError(f"{call.name!r} has something after {_FUNCTION_END}", end)
        except _UnreadableError as error:
            return unread_block(text, blocks, mark, error.place, str(error), "call")

    return read


class _Values:
    """Where the values of a turn's arguments end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._endings = Marks(_ENDING, text)
        self._openings = Marks(_PARAMETER, text)
        self._partners: dict[int, int] = {}
        open_tags: list[int] = []
        for tag in _TAG.finditer(text):
            if tag[0] != _PARAMETER_END:
                open_tags.append(tag.start())
            elif open_tags:
                self._partners[open_tags.pop()] = tag.start()

    def end_of(self, opening: re.Match[str]) -> int | None:
        """Where the value after a tag ends; None: nothing ends it, or there is something outside of values."""
        partner = self._partners.get(opening.start())
        ending = self._endings.after(opening.end() if partner is None else partner)
        if ending is None:
            return None
        if partner is None:
            # A call that was broken off is none of the next one's words.
            return None if self._text.find(OPEN, opening.end(), ending.start()) >= 0 else ending.start()
        following = self._openings.after(partner)
        is_outside = following is not None and following.start() < ending.start()
        return None if is_outside else ending.start()


def _function(text: str, place: int, values: _Values) -> tuple[ToolCall, int]:
    """The function at a place, and where it ends.

    Raises:
        _UnreadableError: there is none.
    """
    function = _FUNCTION.match(text, place)
    if function is None:
        raise _UnreadableError("a call is <function=NAME> ... </function>", place)
    name, arguments = function[1].strip(), {}
    place = skip_space(text, function.end())
    while not text.startswith(_FUNCTION_END, place):
        opening = _PARAMETER.match(text, place)
        end = values.end_of(opening) if opening else None
        if opening is None or end is None:
            raise _UnreadableError(f"{name!r} has something outside of <parameter=KEY> ... </parameter>", place)
        value = text[opening.end() : end]
        arguments[opening[1].strip()] = value.removeprefix("\n").removesuffix("\n")
        place = skip_space(text, end + len(_PARAMETER_END))
    return ToolCall(name, arguments, textual=True), place + len(_FUNCTION_END)
