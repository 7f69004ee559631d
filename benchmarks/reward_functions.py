"""Rewards of the benchmarks, loaded by file path as a user's would be. Standard library only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

LATENCY_S = 0.1


def letter_order(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None) -> float:
    """Share of characters that sort up to the wanted letter: rarely equal within a group, and cheap."""
    del data_source, extra_info
    return sum(character <= ground_truth for character in solution_str) / max(1, len(solution_str))


async def slow_letter_order(completions: Sequence[str], ground_truth: Sequence[str], **columns: Any) -> list[float]:
    """The same for a batch, after a fixed 100 ms per call: a verifier or judge that answers over a network."""
    del columns
    await asyncio.sleep(LATENCY_S)
    return [letter_order("", text, truth, None) for text, truth in zip(completions, ground_truth, strict=True)]
