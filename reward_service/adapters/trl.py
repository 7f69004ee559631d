"""TRL's reward functions: `reward(prompts, completions, completion_ids, **columns)` -> a list of numbers and None.

Values that a function logs are kept: numbers become components, others evidence of their item.
Source: TRL 1.16.0, `GRPOTrainer._calculate_rewards`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rollmesh.reward_service.adapters.arguments import Signature
from rollmesh.reward_service.adapters.results import as_list, number, number_or_none, read_batch
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored

MARK = "completions"
"""The parameter by which such a function is known."""
IDS = "completion_ids"
"""The parameter for the responses' tokens."""


class _Log:
    """Values that a function logs in one call, by name: one per item (`log_extra`), or one for all (`log_metric`)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: list[dict[str, float]] = [{} for _ in range(size)]
        self._texts: list[list[str]] = [[] for _ in range(size)]

    def extra(self, column: str, values: Any) -> None:
        """TRL's `log_extra`."""
        for row, value in enumerate(as_list(values, self._size)):
            if (found := number_or_none(value)) is not None:
                self._numbers[row][str(column)] = found
            elif value is not None:
                self._texts[row].append(f"{column}: {value}")

    def metric(self, name: str, value: Any) -> None:
        """TRL's `log_metric`."""
        for numbers in self._numbers:
            numbers[str(name)] = number(value)

    def added(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Outcomes with what was logged about them."""
        return [
            replace(outcome, components={**self._numbers[row], **outcome.components}, evidence="\n".join(texts))
            if isinstance(outcome, Scored) and ((texts := self._texts[row]) or self._numbers[row])
            else outcome
            for row, outcome in enumerate(outcomes)
        ]


def call(signature: Signature, items: Sequence[RewardItem]) -> Any:
    """Calls the function; what it returns comes with its log."""
    logged = _Log(len(items))
    answer = signature.call(_arguments(items, logged))
    if not inspect.isawaitable(answer):
        return answer, logged

    async def awaited() -> Any:
        return await answer, logged

    return awaited()


def read(items: Sequence[RewardItem], value: Any) -> list[Outcome]:
    """Reads what `call` returned."""
    answer, logged = value
    outcomes: list[Outcome] = logged.added(read_batch(items, answer))
    return outcomes


def _arguments(items: Sequence[RewardItem], logged: _Log) -> dict[str, Any]:
    """Keyword arguments as TRL's trainer passes them: every column a list with one entry per item.

    Prompts and completions are strings, or message lists where the dataset's prompt was one (the row's
    extra_info then carries it as `prompt_messages`). The trainer's state has the step of the policy alone.
    """
    columns: dict[str, Any] = {
        key: [item.extra_info.get(key) for item in items] for item in items for key in item.extra_info
    }
    messages = columns.get("prompt_messages")
    chat = bool(messages) and all(isinstance(entry, list) for entry in messages or ())
    return {
        **columns,
        "prompts": messages if chat else [item.prompt for item in items],
        "completions": [[{"role": "assistant", "content": item.response}] if chat else item.response for item in items],
        IDS: [list(item.response_ids) for item in items],
        "data_source": [item.data_source for item in items],
        "ground_truth": [item.ground_truth for item in items],
        "extra_info": [dict(item.extra_info) for item in items],
        "trainer_state": SimpleNamespace(global_step=max(item.policy_version for item in items)),
        "log_extra": logged.extra,
        "log_metric": logged.metric,
    }
