"""Fields of trainers' rows: found by name, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.learner.data.chat_turns import Messages
from rollmesh.learner.data.records import Record
from rollmesh.mesh.errors import DataError


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


def text_or_messages(record: Record, key: str) -> str | Messages:
    """A field that is a text, or a list of messages with `role` and `content`.

    Raises:
        DataError: it is neither, or a message has a part that is no text, as an image; names field and part.
    """
    value = value_at(record, key)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"field `{key}` is {_kind(value)}, expected a text or a list of messages")
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"field `{key}[{place}]` is no message: it has no `role`")
        content = message.get("content")
        # A call of a tool may stand alone.
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise DataError(f"field `{key}[{place}].content` is {_kind(content)}, expected a text")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") != "text":
                raise _with_images(f"field `{key}[{place}].content` has a part of type {part.get('type')!r}")
    return value


def as_messages(value: str | Messages, role: str) -> Messages:
    """Messages; a text becomes one of the role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _with_images(what: str) -> DataError:
    return DataError(f"{what}, and this command trains on text alone", hint="`rollmesh run` takes images")


def _kind(value: Any) -> str:
    return "missing" if value is None else "empty" if value == [] else type(value).__name__
