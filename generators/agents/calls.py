"""Tool calls as the model writes them, parsed: what every parser gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        name: of the tool.
        arguments: by name.
        call_id: as the model gave it; empty where the format has none.
        textual: values came as text without a type: those of arguments that are no strings are JSON.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""
    textual: bool = False


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a turn says.

    Attributes:
        content: the text outside of calls.
        calls: in order; a `str` in the place of a call that cannot be read, saying what is wrong with it.
    """

    content: str
    calls: tuple[ToolCall | str, ...] = field(default=())

    @property
    def good(self) -> tuple[ToolCall, ...]:
        """The calls that can be read."""
        return tuple(call for call in self.calls if isinstance(call, ToolCall))

    @property
    def errors(self) -> tuple[str, ...]:
        """What is wrong with the others."""
        return tuple(call for call in self.calls if isinstance(call, str))
