"""Tool calls as the model writes them, parsed: the result of every parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.generators.agents.schema_values import ArgumentSchemas


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: by name.
        call_id: as the model gave it; empty where the format has none.
        textual: values came as text without a type; see `typed_arguments`.
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
    """A call's arguments; text without a type is read as the tool's schema says, and stays text where it cannot be.

    Args:
        call: as it was read.
        parameters: the tool's JSON schema of them; what is no such schema says nothing.
    """
    if not call.textual:
        return dict(call.arguments)
    schemas = ArgumentSchemas(parameters)
    return {name: schemas.read(name, value) for name, value in call.arguments.items()}
