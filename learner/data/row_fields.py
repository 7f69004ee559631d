"""Fields of trainers' rows: found by name, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.learner.data.chat_turns import Messages
from rollmesh.learner.data.parts.json_texts import kind_of
from rollmesh.learner.data.parts.messages import text_of, text_or_messages
from rollmesh.learner.data.parts.shown_tools import TOOL_FIELDS, tools_of
from rollmesh.learner.data.parts.template_arguments import FIELDS, read_template_arguments
from rollmesh.learner.data.records import Record
from rollmesh.mesh.errors import DataError

# Columns in which published conversations have their system prompt; the first one with a text counts.
SYSTEM_FIELDS = ("system", "system_prompt")


def value_at(record: Record, key: str) -> Any:
    """The value of a field, or with `a.b` of a field within a field; None without one."""
    found: Any = record
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def refuse_images(record: Record) -> None:
    """Refuses a row with images, which would be trained as if it had none.

    Raises:
        DataError: it has some.
    """
    if record.get("images"):
        raise _with_images("it has images")


def read_field(record: Record, key: str) -> str | Messages:
    """A field that is a text, or a list of messages, in the form of `parts.messages`.

    Raises:
        DataError: it is neither, or a message has a part that is no text, as an image; names field and part.
    """
    found = text_or_messages(value_at(record, key), key)
    if not found and not isinstance(found, str):
        raise DataError(f"field `{key}` is {kind_of(found)}, expected a text or a list of messages")
    for place, message in enumerate(found if not isinstance(found, str) else ()):
        content = message["content"]
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") != "text":
                raise _with_images(f"field `{key}[{place}].content` has a part of type {part.get('type')!r}")
    return found


def system_field(record: Record) -> str | None:
    """The field with the row's system prompt; None without one."""
    return next((key for key in SYSTEM_FIELDS if isinstance(text := record.get(key), str) and text.strip()), None)


def with_system(messages: Messages, record: Record) -> Messages:
    """A conversation with the system prompt of its row.

    Raises:
        DataError: the conversation has another one.
    """
    key = system_field(record)
    if key is None:
        return messages
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": record[key]}, *messages]
    if text_of(messages[0]) != record[key].strip():
        raise DataError(
            f"field `{key}` has another system prompt than the messages",
            hint=f"keep one of them: leave {key} out, or the first message",
        )
    return messages


def refuse_beside_texts(record: Record, remedy: str) -> None:
    """Refuses a row of texts with a system prompt, tools or arguments of a template, which none would show.

    Args:
        record: the row.
        remedy: says how its texts become a conversation.

    Raises:
        DataError: it has one of these.
    """
    key = system_field(record) or (next(key for key in TOOL_FIELDS if record.get(key)) if tools_of(record) else None)
    if key is None and any(read_template_arguments(record).values()):
        key = next(key for key in FIELDS if record.get(key))
    if key is not None:
        raise DataError(
            f"field `{key}` belongs to a conversation, and this row has texts alone, without a template",
            hint=f"{remedy}, or leave {key} out",
        )


def _with_images(what: str) -> DataError:
    return DataError(f"{what}, and this command trains on text alone", hint="`rollmesh run` takes images")
