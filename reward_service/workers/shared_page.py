"""A page of memory that a worker process shares with its owner: its present unit, and since when.

It costs no system call, is exact at the moment at which a worker dies, and can be read however stuck the worker is.
Invariants: one side writes each field; the unit is written after its beginning, so that no unit ever looks older than
it is. A function that truncates every file it finds open takes the memory from no one (on Linux).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
import tempfile
import time
from typing import Self

_NONE = -1
_UNIT = struct.Struct("@q")
_TIME = struct.Struct("@d")
_UNIT_AT, _BEGAN_AT, _RECALLED_AT, _SIZE = 0, 8, 16, 24


class SharedPage:
    """The shared fields. Times are `time.monotonic()`, which all processes of a machine share."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, _SIZE)

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """A page, and a descriptor to be passed to the worker and then closed."""
        descriptor = _memory()
        os.write(descriptor, _UNIT.pack(_NONE) + _TIME.pack(0.0) + _UNIT.pack(_NONE))
        if sys.platform == "linux":
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(descriptor), descriptor

    def begin(self, unit: int) -> None:
        """Marks the beginning of a unit, from the worker."""
        _TIME.pack_into(self._map, _BEGAN_AT, time.monotonic())
        _UNIT.pack_into(self._map, _UNIT_AT, unit)

    def idle(self) -> None:
        """Marks that the worker is between units."""
        _UNIT.pack_into(self._map, _UNIT_AT, _NONE)

    def recall(self, unit: int) -> None:
        """Recalls all units up to this one, from the owner: no worker may begin them any more."""
        _UNIT.pack_into(self._map, _RECALLED_AT, unit)

    @property
    def unit(self) -> int | None:
        """The unit that the worker is busy with; None between units."""
        (unit,) = _UNIT.unpack_from(self._map, _UNIT_AT)
        return None if unit == _NONE else unit

    @property
    def began(self) -> float:
        """The time at which it began that unit."""
        (began,) = _TIME.unpack_from(self._map, _BEGAN_AT)
        return float(began)

    @property
    def recalled(self) -> int:
        """The last unit that is not to be begun."""
        (unit,) = _UNIT.unpack_from(self._map, _RECALLED_AT)
        return int(unit)

    def close(self) -> None:
        """Unmaps it."""
        self._map.close()


def _memory() -> int:
    if sys.platform == "linux":
        return os.memfd_create("reward-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
