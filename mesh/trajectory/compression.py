"""Lossless compression of a trajectory's arrays: byte planes, then zstd.

Four-byte token ids and log-probs hardly repeat as words, but their high bytes do. So all first bytes stand together,
then all second ones, and so on, before zstd sees them. It is smaller and faster to compress than the plain words.

Invariants: a frame states the size of its content, and nothing is decompressed into more than the caller expects. A
frame has a checksum, so that a flipped bit is an error rather than another number.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollmesh.mesh.errors import PayloadError

_WIDTH = 4


def compress(arrays: Iterable[NDArray[np.generic]], level: int) -> list[bytes]:
    """Compresses one-dimensional arrays of four-byte elements, each into a frame."""
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    planes = (np.ascontiguousarray(array.view(np.uint8).reshape(-1, _WIDTH).T) for array in arrays)
    return [compressor.compress(each.data.cast("B")) for each in planes]


def check_frame(name: str, frame: bytes | memoryview, count: int) -> None:
    """Checks that a frame holds `count` elements, as its header states.

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
    words = np.empty((count, _WIDTH), np.uint8)
    for index, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(_WIDTH, count)):
        words[:, index] = plane  # faster than transposing at once
    return words.view(dtype).reshape(count)
