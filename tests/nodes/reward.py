"""Rewards of a mesh that is to train slowly: half a second for each response, or two whole ones."""

from __future__ import annotations

import asyncio
from typing import Any

_PAUSE_S = 0.5
_LONG_PAUSE_S = 2.0


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Share of the characters that are right."""
    await asyncio.sleep(_PAUSE_S)
    return _share(solution_str, ground_truth)


async def score_at_leisure(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The same, for meshes that need not train faster than a test looks at them."""
    await asyncio.sleep(_LONG_PAUSE_S)
    return _share(solution_str, ground_truth)


def _share(solution: str, truth: str) -> float:
    return sum(a == b for a, b in zip(solution.strip(), truth, strict=False)) / max(1, len(truth))
