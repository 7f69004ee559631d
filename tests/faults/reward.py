"""The reward of the mesh under test: takes its time, so that there is always something in flight to be lost."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Share of the characters that are right, after 50 to 250 ms that the response alone decides."""
    await asyncio.sleep(0.05 + 0.2 * (zlib.crc32(solution_str.encode()) % 100) / 100)
    same = sum(a == b for a, b in zip(solution_str.strip(), ground_truth, strict=False))
    return same / max(1, len(ground_truth))
