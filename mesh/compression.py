"""Lossless compression of a trajectory's arrays: byte planes, then zstd.

Four-byte token ids and log-probs hardly repeat as words, but their high bytes do: all first bytes stand together, then
all second ones, and so on, before zstd sees them. It is smaller and faster to compress than the plain words.

Invariants: a frame states the size of its content, and nothing is decompressed into more than the caller expects; a
frame has a checksum, so that a flipped bit is an error rather than another number.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from mesh.errors import PayloadError

_WIDTH = 4


def compress(array: NDArray[np.generic], level: int) -> bytes:
    """A frame with the bytes of a one-dimensional array of four-byte elements."""
    planes = np.ascontiguousarray(array.view(np.uint8).reshape(-1, _WIDTH).T)
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(planes.data.cast("B"))


def check_frame(name: str, frame: bytes | memoryview, count: int) -> None:
    """Sees that a frame holds `count` elements, by what its header says.

    Raises:
        PayloadError: it is no frame, or one of another size.
    """
    try:
        found = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise PayloadError(f"arrays.{name}", f"not a zstd frame: {error}") from error
    if found.content_size != _WIDTH * count or found.dict_id or not found.has_checksum:
        raise PayloadError(f"arrays.{name}", f"a frame of {found.content_size} bytes for {count} elements")


def decompress(name: str, frame: bytes | memoryview, count: int, dtype: str) -> NDArray[np.generic]:
    """The array of `count` elements in a frame.

    Raises:
        PayloadError: the frame is damaged, or of another size.
    """
    check_frame(name, frame, count)
    try:
        planes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"arrays.{name}", f"damaged: {error}") from error
    if len(planes) != _WIDTH * count:
        raise PayloadError(f"arrays.{name}", f"{len(planes)} bytes for {count} elements")
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(_WIDTH, count).T).view(dtype).reshape(count)
