"""verl's `compute_score`, for one response (`naive`, `dapo`, `prime`, `limited`) and for many (`batch`).

Source: verl 0.9.1, `verl/workers/reward_manager` and `verl/experimental/reward_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.reward_service.adapters.arguments import Signature
from rollmesh.reward_service.adapters.results import read_score
from rollmesh.reward_service.outcomes import Outcome, RewardItem

SINGLE = frozenset({"solution_str", "ground_truth"})
BATCH = frozenset({"solution_strs", "ground_truths"})
"""Parameters by which the two are known."""


def call_single(signature: Signature, items: Sequence[RewardItem]) -> Any:
    """Calls the function for the one item."""
    (item,) = items
    return signature.call(
        {
            "data_source": item.data_source,
            "solution_str": item.response,
            "ground_truth": item.ground_truth,
            "extra_info": dict(item.extra_info),
        }
    )


def read_single(_items: Sequence[RewardItem], value: Any) -> list[Outcome]:
    """Reads what it returned."""
    return [read_score(value)]


def call_batch(signature: Signature, items: Sequence[RewardItem]) -> Any:
    """Calls the function for all items."""
    return signature.call(
        {
            "data_sources": [item.data_source for item in items],
            "solution_strs": [item.response for item in items],
            "ground_truths": [item.ground_truth for item in items],
            "extra_infos": [dict(item.extra_info) for item in items],
        }
    )
