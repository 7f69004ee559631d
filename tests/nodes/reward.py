"""The reward of a mesh that is to train slowly: half a second for each response."""

from __future__ import annotations

import asyncio
from typing import Any


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Share of the characters that are right."""
    await asyncio.sleep(0.5)
    same = sum(a == b for a, b in zip(solution_str.strip(), ground_truth, strict=False))
    return same / max(1, len(ground_truth))
