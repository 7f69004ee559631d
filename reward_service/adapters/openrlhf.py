"""OpenRLHF's `reward_func(queries, prompts, labels)`, and what it and its reward servers answer.

A query is the prompt with its response. The answer is a dict with `rewards`, and perhaps `scores` and `extra_logs`.
Each is a list or tensor with one value per query. Source: OpenRLHF 0.11.2, `SingleTurnAgentExecutor`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollmesh.reward_service.adapters.arguments import Signature
from rollmesh.reward_service.adapters.results import OutputError, as_list, number, read_entry
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored

MARKS = frozenset({"queries", "labels"})
"""Parameters by which such a function is known."""


def call(signature: Signature, items: Sequence[RewardItem]) -> Any:
    """Calls the function for all items."""
    return signature.call(
        {
            "queries": [item.prompt + item.response for item in items],
            "prompts": [item.prompt for item in items],
            "labels": [label_of(item.ground_truth) for item in items],
        }
    )


def read(items: Sequence[RewardItem], value: Any) -> list[Outcome]:
    """Reads what it returned."""
    return read_rewards(len(items), value)


def read_rewards(size: int, answer: Any) -> list[Outcome]:
    """Outcomes of an answer about `size` queries; scores and logs are components.

    Raises:
        OutputError: it is none.
    """
    if not isinstance(answer, Mapping):
        return [read_entry(value) for value in as_list(answer, size)]
    if "rewards" not in answer:
        raise OutputError(f"returned a dict without 'rewards': {sorted(map(str, answer))}")
    outcomes = [read_entry(value) for value in as_list(answer["rewards"], size)]
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise OutputError(f"returned extra_logs of type {type(logs).__name__}, expected a dict")
    columns = {str(name): as_list(values, size) for name, values in logs.items()}
    if (scores := answer.get("scores")) is not None:
        columns["scores"] = as_list(scores, size)
    return [
        Scored(outcome.total, {name: number(values[row]) for name, values in columns.items()})
        if isinstance(outcome, Scored)
        else outcome
        for row, outcome in enumerate(outcomes)
    ]


def label_of(ground_truth: Any) -> str:
    """The label of a ground truth: a string as it is, anything else as JSON, none as the empty string."""
    if ground_truth is None:
        return ""
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth)
