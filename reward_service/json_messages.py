"""Messages of the contract as JSON: the mapping of proto3, with the fields' names as in reward.proto.

Readers take names in lowerCamelCase too, and pass over fields that they do not know.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.json_format import MessageToJson, Parse, ParseError
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
        parsed: M = Parse(content, message, ignore_unknown_fields=True)
    except (ParseError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise JsonError(str(error) or type(error).__name__) from error
    return parsed


def to_json(message: Message, *, defaults: bool) -> bytes:
    """A message as one line of JSON.

    Args:
        defaults: fields that are 0 or empty are written, too.
    """
    text = MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=defaults, indent=None
    )
    return text.encode()
