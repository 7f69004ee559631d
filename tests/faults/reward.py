"""The reward of the mesh under test: takes its time, so that there is always something in flight to be lost.

Where a file lies at `FREEZE_VARIABLE`, the next call removes it and keeps the interpreter to itself for as many seconds
as it says. A C extension that never releases the interpreter does so: nothing else in the process runs, its health and
its connections among it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import zlib
from pathlib import Path
from typing import Any

FREEZE_VARIABLE = "ROLLMESH_FAULTS_FREEZE"


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Share of the characters that are right, after 50 to 250 ms that the response alone decides."""
    _freeze_if_told()
    await asyncio.sleep(0.05 + 0.2 * (zlib.crc32(solution_str.encode()) % 100) / 100)
    same = sum(a == b for a, b in zip(solution_str.strip(), ground_truth, strict=False))
    return same / max(1, len(ground_truth))


def _freeze_if_told() -> None:
    path = os.environ.get(FREEZE_VARIABLE)
    if not path:
        return
    try:
        seconds = float(Path(path).read_text())
        Path(path).unlink()
    except FileNotFoundError:
        return
    # Through `PyDLL`, which unlike `CDLL` keeps the interpreter's lock.
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
