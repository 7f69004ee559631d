"""Reward functions in one form, whatever signature they were written with.

These signatures are accepted unchanged, distinguished by their parameter names:

* verl: `compute_score(data_source, solution_str, ground_truth, extra_info)` -> float, or dict with "score";
  and in batches `compute_score(data_sources, solution_strs, ground_truths, extra_infos)` -> list of these;
* TRL: `reward(prompts, completions, completion_ids, **columns)` -> list of floats, None where unscorable;
* OpenRLHF: `reward_func(queries, prompts, labels)` -> dict with "rewards";
* ours: `reward(items: Sequence[RewardItem])` -> list of outcomes (or floats, or None).

Each may be a coroutine function. The batch forms see whole groups: one call per group.
Invariant: an adapted function returns one outcome per item or raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.adapters import openrlhf, trl, verl
from rollmesh.reward_service.adapters.arguments import Signature
from rollmesh.reward_service.adapters.results import failure, read_batch, read_scores
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, checked_outcome
from rollmesh.reward_service.scorers import ItemScorer

Call = Callable[[Sequence[RewardItem]], Any]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """An adapted reward function.

    Attributes:
        name: for components and errors.
        whole_group: it is given all items of a group that a request holds; otherwise one item per call.
        asynchronous: `call` returns an awaitable of the outcomes.
        call: items -> what the user's function returned.
        read: (items, what it returned) -> one outcome per item.
    """

    name: str
    whole_group: bool
    asynchronous: bool
    call: Call
    read: Callable[[Sequence[RewardItem], Any], list[Outcome]]

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Outcomes of a synchronous function; whatever it raises becomes `Failed` for all items."""
        try:
            return self._checked(items, self.read(items, self.call(items)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            return [self.failure(error)] * len(items)

    async def score_async(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """The same for a coroutine function. Cancelling it cancels the user's coroutine."""
        try:
            awaitable: Awaitable[Any] = self.call(items)
            return self._checked(items, self.read(items, await awaitable))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            return [self.failure(error)] * len(items)

    def failure(self, error: BaseException) -> Failed:
        """The outcome of an exception, naming this function."""
        return failure(self.name, error)

    def _checked(self, items: Sequence[RewardItem], outcomes: list[Outcome]) -> list[Outcome]:
        return [checked_outcome(outcome, item, self.name) for item, outcome in zip(items, outcomes, strict=True)]


def from_scorer(name: str, scorer: ItemScorer) -> RewardFunction:
    """A built-in scorer."""
    return RewardFunction(name, False, False, lambda items: [scorer(items[0])], lambda _items, outcomes: outcomes)


def adapt(name: str, function: Callable[..., Any]) -> RewardFunction:
    """Recognizes the signature of a user's function.

    Raises:
        RewardError: none of the signatures fits.
    """
    try:
        signature = Signature.of(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward function {name}: its signature cannot be read: {error}") from error
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the bound method is wanted, not callability
    )
    parameters = signature.parameters
    if trl.MARK in parameters:
        return RewardFunction(name, True, asynchronous, partial(trl.call, signature), trl.read)
    if parameters.keys() >= verl.SINGLE:
        return RewardFunction(name, False, asynchronous, partial(verl.call_single, signature), verl.read_single)
    if parameters.keys() >= verl.BATCH:
        return RewardFunction(name, True, asynchronous, partial(verl.call_batch, signature), read_scores)
    if parameters.keys() >= openrlhf.MARKS:
        return RewardFunction(name, True, asynchronous, partial(openrlhf.call, signature), openrlhf.read)
    if [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD] == ["items"]:
        return RewardFunction(name, True, asynchronous, function, read_batch)
    raise RewardError(
        f"reward function {name}{inspect.signature(function)} has no known signature",
        hint="write compute_score(data_source, solution_str, ground_truth, extra_info), "
        "reward(prompts, completions, **columns) or reward(items); docs/peer-rewards.md lists all forms",
    )
