"""The place of each tensor: buckets are filled in the order in which tensors come.

Invariants: a tensor lies whole in one bucket, at an offset that is a multiple of `ALIGNMENT`. Buckets lie one after the
other, each padded to `ALIGNMENT`, so that every tensor of a mapped file is aligned for any dtype. A bucket exceeds
`bucket_bytes` only where a single tensor does. Layout needs no look ahead: tensors may be produced one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.mesh.errors import WeightsError

ALIGNMENT = 64
# Bytes per element of the dtypes that may travel, by the names that torch, safetensors and numpy share.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor.

    Raises:
        WeightsError: a dtype that cannot travel.
    """
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise WeightsError(f"dtype {dtype!r} cannot be sent", hint=f"known: {', '.join(DTYPE_BYTES)}")
    return size * math.prod(shape)


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of one tensor.

    Attributes:
        bucket: index of its bucket.
        offset: bytes from the start of the bucket.
        start: bytes from the start of the file in which the buckets are concatenated.
        opens_bucket: the tensor is the first of its bucket.
    """

    bucket: int
    offset: int
    start: int
    opens_bucket: bool


class BucketLayout:
    """Places tensors as they come.

    Args:
        bucket_bytes: bytes above which a bucket is closed.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._open = False
        self._bucket = -1
        self._bucket_start = 0
        self._end = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all buckets so far, the padding at the end included."""
        return aligned(self._end)

    def place(self, nbytes: int) -> Placement:
        """The place of the next tensor, which has `nbytes` bytes."""
        start = aligned(self._end)
        opens = not self._open or start + nbytes - self._bucket_start > self._bucket_bytes
        if opens:
            self._open = True
            self._bucket += 1
            self._bucket_start = start
        self._end = start + nbytes
        return Placement(self._bucket, start - self._bucket_start, start, opens)

    def close_bucket(self) -> None:
        """Has the next tensor open a bucket."""
        self._open = False


def aligned(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
