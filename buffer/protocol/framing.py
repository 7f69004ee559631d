"""Protobuf messages put together from parts that are serialized already.

Metas, prompts and payloads are stored as the bytes that a message carries. Parsing them only to serialize them again
was the largest share of a front's work on a sampled group, and copied every payload twice. A serialized message is the
concatenation of its fields in any order. So those parts are joined as they are, and the result parses as the message
itself would.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from rollmesh.mesh.varints import encode_varint

_DELIMITED = 2


@lru_cache(maxsize=8192)
def field_header(number: int, size: int) -> bytes:
    """Tag and length that stand before `size` bytes of the field `number` (message, bytes or string)."""
    return encode_varint(number << 3 | _DELIMITED) + encode_varint(size)


def repeated_field(number: int, values: Iterable[bytes]) -> list[bytes]:
    """A repeated field, as parts to be joined."""
    parts: list[bytes] = []
    for value in values:
        parts += (field_header(number, len(value)), value)
    return parts
