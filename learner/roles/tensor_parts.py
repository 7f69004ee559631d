"""Tensors as messages: cut into parts, and put together again.

Invariant: a tensor is exactly what was sent, or an error names it. Nothing is read as code, and no more memory is taken
than was allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.errors import PayloadError
from rollmesh.protos import role_pb2

PART_BYTES = 4 << 20
"""Bytes of a part: far below what a message may have, and enough that its frame costs nothing."""
_DTYPES = frozenset({"<f4", "<f8", "<i4", "<i8", "|u1", "|b1"})
# Far more than any tensor of a batch has.
_MOST_DIMENSIONS = 8

Arrays = dict[str, NDArray[Any]]
"""Arrays by name."""


def to_parts(arrays: Mapping[str, NDArray[Any]]) -> Iterator[role_pb2.TensorPart]:
    """The parts of tensors, one tensor after another; an empty tensor has one part.

    Raises:
        TypeError: a dtype that does not travel.
    """
    for name, array in arrays.items():
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        if little.dtype.str not in _DTYPES:
            raise TypeError(f"{name} has dtype {array.dtype}: {', '.join(sorted(_DTYPES))} can be sent")
        data = little.reshape(-1).view(np.uint8)
        for offset in range(0, max(len(data), 1), PART_BYTES):
            yield role_pb2.TensorPart(
                name=name,
                dtype=little.dtype.str,
                shape=array.shape,
                offset=offset,
                data=data[offset : offset + PART_BYTES].tobytes(),
            )


class TensorAssembly:
    """Tensors that arrive in parts.

    Args:
        most_bytes: of all of them together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._arrays: Arrays = {}
        self._filled: dict[str, int] = {}

    def add(self, part: role_pb2.TensorPart) -> None:
        """Adds a part.

        Raises:
            PayloadError: it is not the next one of its tensor, or the tensors are too large.
        """
        name = part.name
        if name not in self._arrays:
            self._arrays[name] = self._allocate(part)
            self._filled[name] = 0
        array = self._arrays[name]
        place = array.reshape(-1).view(np.uint8)
        filled = self._filled[name]
        if part.dtype != array.dtype.str or tuple(part.shape) != array.shape or part.offset != filled:
            raise PayloadError(
                f"tensor {name}", f"a part at {part.offset} does not follow the {filled} bytes before it"
            )
        if filled + len(part.data) > len(place):
            raise PayloadError(f"tensor {name}", f"more bytes than its shape {array.shape} has")
        place[filled : filled + len(part.data)] = np.frombuffer(part.data, dtype=np.uint8)
        self._filled[name] = filled + len(part.data)

    def finish(self) -> Arrays:
        """The tensors by name.

        Raises:
            PayloadError: the end of one is missing.
        """
        for name, array in self._arrays.items():
            if self._filled[name] != array.nbytes:
                raise PayloadError(f"tensor {name}", f"{self._filled[name]} of {array.nbytes} bytes have come")
        return self._arrays

    def _allocate(self, part: role_pb2.TensorPart) -> NDArray[Any]:
        if part.dtype not in _DTYPES:
            raise PayloadError(f"tensor {part.name}", f"has the unknown dtype {part.dtype!r}")
        if len(part.shape) > _MOST_DIMENSIONS:
            raise PayloadError(
                f"tensor {part.name}", f"{len(part.shape)} dimensions, and {_MOST_DIMENSIONS} are allowed"
            )
        dtype = np.dtype(part.dtype)
        size = math.prod(part.shape) * dtype.itemsize
        if size > self._left:
            raise PayloadError(f"tensor {part.name}", f"{size} bytes, and {self._left} more are allowed")
        try:
            array = np.empty(tuple(part.shape), dtype=dtype)
        except (ValueError, OverflowError) as error:
            # Sides of an empty tensor count, whatever they are.
            raise PayloadError(f"tensor {part.name}", f"no array has the shape {list(part.shape)}: {error}") from error
        self._left -= size
        return array
