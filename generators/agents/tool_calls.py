"""Tool calls as the model writes them, parsed: the result of every parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

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
    """A parsed turn.

    Attributes:
        content: the text outside of calls.
        calls: in order; a `str` in the place of a call that cannot be read, saying what is wrong with it.
    """

    content: str
    calls: tuple[ToolCall | str, ...] = field(default=())

    @property
    def valid(self) -> tuple[ToolCall, ...]:
        """The calls that can be read."""
        return tuple(call for call in self.calls if isinstance(call, ToolCall))

    @property
    def errors(self) -> tuple[str, ...]:
        """The errors of the others."""
        return tuple(call for call in self.calls if isinstance(call, str))


def typed_arguments(call: ToolCall, parameters: Any) -> dict[str, Any]:
    """A call's arguments; text without a type is read as JSON where it can be and no text is expected.

    Args:
        call: as it was read.
        parameters: the tool's JSON schema of them; what is no such schema says nothing.
    """
    if not call.textual:
        return dict(call.arguments)
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    return {name: value if _may_be_text(schemas.get(name)) else _read(value) for name, value in call.arguments.items()}


def _may_be_text(schema: Any) -> bool:
    """True where a JSON schema takes a string; a schema without a type does."""
    if not isinstance(schema, Mapping):
        return True
    ways = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(ways, list):
        return any(map(_may_be_text, ways))
    kinds = schema.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
