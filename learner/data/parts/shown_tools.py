"""The tools that a row shows: of its own field, or of the message that brings them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.learner.data.chat_turns import Messages
from rollmesh.learner.data.parts.tools import read_tools
from rollmesh.learner.data.records import Record
from rollmesh.mesh.errors import DataError

# Columns with schemas of tools; OpenAI's earlier rows have `functions`.
TOOL_FIELDS = ("tools", "functions")


def tools_of(record: Record) -> list[dict[str, Any]]:
    """Schemas of the row's tools, see `parts.tools`; empty without any.

    Raises:
        DataError: they are something else.
    """
    return next((tools for key in TOOL_FIELDS if (tools := read_tools(record.get(key), key))), [])


def schemas_of(record: Record) -> list[dict[str, Any]]:
    """As `tools_of` for a row whose columns are the reward's: a column of that name may be something else."""
    try:
        tools = tools_of(record)
    except DataError:
        return []
    return tools if all(isinstance(tool.get("function"), Mapping) for tool in tools) else []


def shown_tools(given: list[dict[str, Any]], messages: Messages) -> tuple[Messages, list[dict[str, Any]]]:
    """The messages without tools of their own, and the tools that their row shows.

    Published rows have them in the system message, which no template looks at there.

    Args:
        given: tools of the row's own field.
        messages: of the row.

    Raises:
        DataError: the row and its messages have several lists, or one comes after an answer.
    """
    shown, answered = given, False
    for place, message in enumerate(messages):
        for key in TOOL_FIELDS:
            tools = read_tools(message.get(key), f"message {place}.{key}")
            if tools and (answered or tools != (shown or tools)):
                where = "after an answer" if answered else "and others stand before it"
                raise DataError(
                    f"message {place} has `{key}` of its own, {where}",
                    hint="a prompt shows one list of tools, at its beginning: give all of them in the row's `tools`, "
                    f"and leave `{key}` out of the message",
                )
            shown = shown or tools
        answered = answered or message["role"] == "assistant"
    return [{name: value for name, value in message.items() if name not in TOOL_FIELDS} for message in messages], shown
