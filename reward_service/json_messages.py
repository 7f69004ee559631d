"""Messages of the contract as JSON: the mapping of proto3, with the fields' names as in reward.proto.

Readers take names in lowerCamelCase too, and pass over fields that they do not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import Message

TIMEOUT_HEADER = "Rollmesh-Timeout-Ms"
"""The header with the milliseconds that the caller waits, a whole number."""
M = TypeVar("M", bound=Message)


class JsonError(ValueError):
    """A text that is not the message in JSON."""


def from_json(content: bytes, message: M) -> M:
    """Fills a message from its JSON.

    Raises:
        JsonError: it is none.
    """
    try:
        value = json.loads(content.decode(), object_pairs_hook=_object)
        _check_objects(value, message.DESCRIPTOR)
        parsed: M = ParseDict(value, message, ignore_unknown_fields=True)
    except (ParseError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise JsonError(str(error) or type(error).__name__) from error
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise JsonError("an object has a key twice")
    return found


def _check_objects(value: Any, kind: Any) -> None:
    """Refuses a text or a list in place of a message.

    The parser would take it for an empty message, such as a score of 0.

    Args:
        kind: descriptor of the message.

    Raises:
        JsonError: there is one.
    """
    if not isinstance(value, dict):
        raise JsonError(f"{kind.name} is no object")
    for field in kind.fields:
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for name in {field.name, field.json_name} & value.keys():
            parts: Iterable[Any] = (
                value[name] if isinstance(value[name], list) and field.is_repeated else (value[name],)
            )
            for part in parts:
                if part is not None:
                    _check_objects(part, field.message_type)


def to_json(message: Message, *, defaults: bool) -> bytes:
    """A message as one line of JSON.

    Args:
        defaults: fields that are 0 or empty are written, too.
    """
    text = MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=defaults, indent=None
    )
    return text.encode()
