"""Messages between a zygote and its owner: a JSON object and byte strings, with their lengths in front.

The owner first sends the settings. The zygote answers `{"rung": n, "landlock": abi}`, or `{"missing": reason}` and
ends. Then come jobs, one at a time. A job is followed by its runs: `{"wall_s": seconds, "last": false}` with an input.
The next run is sent after the answer to the one before; `{}` ends the job. Nothing is ever
unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

# Lengths of the object's text and of all byte strings together.
HEAD = struct.Struct(">II")
# The byte strings' own lengths are under this name.
_SIZES = "sizes"


def pack(fields: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """A message as bytes."""
    text = json.dumps({**fields, _SIZES: [len(blob) for blob in blobs]}).encode()
    return b"".join([HEAD.pack(len(text), sum(map(len, blobs))), text, *blobs])


def unpack(text: bytes, body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The object and the byte strings of a message."""
    fields = json.loads(text)
    blobs, begin = [], 0
    for size in fields.pop(_SIZES):
        blobs.append(body[begin : begin + size])
        begin += size
    return fields, blobs


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
    """The next message, blocking; None once the other side has hung up."""
    head = _exactly(connection, HEAD.size)
    if head is None:
        return None
    sizes = HEAD.unpack(head)
    text, body = (_exactly(connection, size) for size in sizes)
    return None if text is None or body is None else unpack(text, body)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
