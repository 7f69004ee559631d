"""BucketChunk messages written and read by hand.

Invariants: what `frame` writes is the message as protobuf would read it, and `parse` reads whatever protobuf writes.
Protobuf's own code copies a chunk's bytes twice on each side. Here they are copied once from where they lie, and on the
receiving side not at all before they reach their place.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.varints import encode_varint
from rollmesh.protos import weights_pb2

# Larger messages are slower, smaller ones cost more calls.
CHUNK_BYTES = 1 << 20
_OFFSET, _DATA = b"\x08", b"\x12"  # tags: field 1 as a varint, field 2 as bytes
# Bits of the longest varint. Longer ones would make this process compute for minutes.
_VARINT_BITS = 70


def frame(offset: int, data: memoryview) -> bytes:
    """A serialized BucketChunk.

    Args:
        offset: of the data in its bucket, in bytes.
        data: flat, of bytes.
    """
    return b"".join((_OFFSET, encode_varint(offset), _DATA, encode_varint(len(data)), data))


def frames(bucket: memoryview, offset: int) -> Iterator[bytes]:
    """The serialized chunks of a bucket's bytes from `offset` on."""
    for start in range(offset, len(bucket), CHUNK_BYTES):
        yield frame(start, bucket[start : start + CHUNK_BYTES])


def parse(message: bytes) -> tuple[int, memoryview]:
    """Offset and data of a serialized BucketChunk; the data is a view of the message.

    Raises:
        PayloadError: it is no such message.
    """
    try:
        offset, at = 0, 0
        if message[:1] == _OFFSET:
            offset, at = _read_varint(message, 1)
        if message[at : at + 1] == _DATA:
            length, start = _read_varint(message, at + 1)
            if start + length == len(message):
                return offset, memoryview(message)[start:]
        # Fields in another order, or none: valid all the same.
        chunk = weights_pb2.BucketChunk.FromString(message)
    except (DecodeError, IndexError) as error:
        raise PayloadError("message", f"{len(message)} bytes that are no chunk of a bucket: {error}") from error
    return chunk.offset, memoryview(chunk.data)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The value and the place after it.

    Raises:
        IndexError: it does not end.
    """
    value = 0
    for shift in range(0, _VARINT_BITS, 7):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise IndexError("a number that does not end")
