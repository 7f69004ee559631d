"""Entries of side data (`MemberMeta.side`): what both ends of the wire check of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.errors import PayloadError
from rollmesh.protos import trajectory_pb2 as trajectory

# Element types of arrays; they travel little-endian.
DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{16}")


def check_name(name: str, field: str = "side") -> str:
    """A name of side data; `field` names it in errors.

    Raises:
        PayloadError: not 1 to 64 letters, digits, `_`, `.` or `-`.
    """
    if not _NAME.fullmatch(name):
        raise PayloadError(field, f"expected 1 to 64 of A-Z a-z 0-9 _ . -, got {name[:80]!r}")
    return name


def check_digest(field: str, digest: str) -> str:
    """A digest of stored bytes, xxh3-64.

    Raises:
        PayloadError: not 16 hexadecimal digits.
    """
    if not _DIGEST.fullmatch(digest):
        raise PayloadError(field, f"expected 16 hexadecimal digits, got {digest[:80]!r}")
    return digest


def check_side(side: Sequence[trajectory.SideData]) -> None:
    """The entries of a member.

    Raises:
        PayloadError: naming the field that is wrong.
    """
    names = set()
    for index, entry in enumerate(side):
        where = f"meta.side[{index}]"
        if check_name(entry.name, f"{where}.name") in names:
            raise PayloadError(f"{where}.name", f"{entry.name} is there twice")
        names.add(entry.name)
        check_digest(f"{where}.digest", entry.digest)
        if entry.bytes == 0:
            raise PayloadError(f"{where}.bytes", "must be at least 1")
        if entry.dtype:
            _check_array(entry, where)


def _check_array(entry: trajectory.SideData, where: str) -> np.dtype[np.generic]:
    if entry.dtype not in DTYPES:
        raise PayloadError(f"{where}.dtype", f"expected one of {', '.join(DTYPES)}, got {entry.dtype[:80]!r}")
    dtype: np.dtype[np.generic] = np.dtype(entry.dtype).newbyteorder("<")
    if math.prod(entry.shape) * dtype.itemsize != entry.bytes:
        raise PayloadError(f"{where}.shape", f"{list(entry.shape)[:8]} of {entry.dtype} is not {entry.bytes} bytes")
    return dtype


def array_of(entry: trajectory.SideData, data: bytes) -> NDArray[np.generic]:
    """The array that an entry describes; a view of `data`, which has `entry.bytes` bytes.

    Raises:
        PayloadError: the entry contradicts itself.
    """
    return np.frombuffer(data, _check_array(entry, f"side.{entry.name}")).reshape(tuple(entry.shape))
