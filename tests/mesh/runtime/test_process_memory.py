"""The memory of one process by kind, and its peak."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

from rollmesh.mesh.runtime.process_memory import ResidentMemory, resident_memory

_SIZE = 128 << 20
# Threads and garbage of other tests take and free some too.
_NOISE = _SIZE // 2


def test_own_pages_and_those_of_files_are_told_apart(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(_SIZE)
    gc.collect()
    before = resident_memory()
    own = bytearray(os.urandom(1)) * _SIZE
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        after = resident_memory(os.getpid())
    assert abs(after.anonymous - before.anonymous - len(own)) < _NOISE
    assert abs(after.files + after.shared - before.files - before.shared - _SIZE) < _NOISE
    assert after.peak >= after.anonymous + after.files + after.shared - _NOISE


def test_a_process_that_has_ended_has_none() -> None:
    assert resident_memory(2**22 + 1) == ResidentMemory()
