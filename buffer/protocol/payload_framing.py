"""Payloads travel next to the parsed part of a message: as one field of bytes, joined and split by hand.

Protobuf copies what it parses twice, into the message and out of it, and frees the memory in between.
The field stands first, so that its place is known from the first bytes of a message. One that protobuf itself has
serialized, with the field elsewhere, is understood as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from rollmesh.buffer.protocol.framing import field_header
from rollmesh.mesh.errors import PayloadError

Parsed = TypeVar("Parsed", bound=Message)
_LONGEST_VARINT = 10


class ParsedMessage(NamedTuple, Generic[Parsed]):
    """A message without its payloads, and the payloads, concatenated."""

    message: Parsed
    payloads: memoryview


def join_message(number: int, payloads: Sequence[bytes], rest: Iterable[bytes]) -> bytes:
    """A serialized message.

    Args:
        number: of the field with the payloads.
        payloads: are concatenated.
        rest: serialized parts of the message.
    """
    size = sum(map(len, payloads))
    return b"".join((field_header(number, size), *payloads, *rest)) if size else b"".join(rest)


def split_parser(kind: type[Parsed], field: str) -> Callable[[bytes], ParsedMessage[Parsed]]:
    """A parser of messages with payloads in `field`. It raises `DecodeError` as that of the message does."""
    tag = field_header(kind.DESCRIPTOR.fields_by_name[field].number, 0)[:-1]

    def parse(data: bytes) -> ParsedMessage[Parsed]:
        start, end = _span(data, tag)
        message = kind.FromString(data[end:])
        # The last value of a field counts.
        later: bytes = getattr(message, field)
        return ParsedMessage(message, memoryview(later) if later else memoryview(data)[start:end])

    return parse


def _span(data: bytes, tag: bytes) -> tuple[int, int]:
    """Start and end of the payloads; (0, 0) if another field is first."""
    if not data.startswith(tag):
        return 0, 0
    size = shift = 0
    for start in range(len(tag), min(len(data), len(tag) + _LONGEST_VARINT)):
        size |= (data[start] & 0x7F) << shift
        if data[start] < 0x80:
            if start + 1 + size > len(data):
                raise DecodeError(f"{len(data) - start - 1} bytes of payloads, {size} were said")
            return start + 1, start + 1 + size
        shift += 7
    raise DecodeError("payloads of unknown length")


def split_payloads(payloads: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    """The single payloads, which share the memory of the message.

    Raises:
        PayloadError: they have fewer bytes, or more.
    """
    found, at = [], 0
    for size in sizes:
        found.append(payloads[at : at + size])
        at += size
    if at != len(payloads):
        raise PayloadError("payload_bytes", f"add up to {at}, but the message has {len(payloads)} bytes of payloads")
    return found
