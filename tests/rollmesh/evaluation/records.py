"""Records of prompts and their responses, as evaluations store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.evaluation.comparison import Measured


def record(row: int, rewards: Sequence[float | None], source: str = "a") -> dict[str, Any]:
    """A prompt with one response for each reward; None: it has no score."""
    return {
        "row": row,
        "data_source": source,
        "prompt": f"prompt {row}",
        "ground_truth": row,
        "responses": [
            {
                "text": f"={reward}",
                "reward": reward,
                "reason": "" if reward is not None else "timeout",
                "tokens": 4,
                "finish": "stop",
            }
            for reward in rewards
        ],
    }


def measured(
    name: str, records: Sequence[dict[str, Any]], n: int = 1, changes: dict[str, Any] | None = None
) -> Measured:
    """A model's responses, with the measurement that they had."""
    measurement = {"data.eval": "f00d", "reward.functions": ["math"], "eval.n": n, "eval.right_at": 1.0}
    measurement |= {"eval.temperature": 0.0, "eval.rows": None}
    return Measured(name, f"{name}.jsonl", measurement | (changes or {}), records)
