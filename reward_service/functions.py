"""Reward functions in one form, whatever signature they were written with.

These signatures are accepted unchanged, distinguished by their parameter names:

* verl: `compute_score(data_source, solution_str, ground_truth, extra_info)` -> float, or dict with "score" (and
  "spans", rewards of parts); in batches `compute_score(data_sources, solution_strs, ground_truths, extra_infos)` ->
  list of these;
* TRL: `reward(prompts, completions, completion_ids, **columns)` -> list of floats, None where unscorable;
* OpenRLHF: `reward_func(queries, prompts, labels)` -> dict with "rewards";
* ours: `reward(items: Sequence[RewardItem])` -> list of outcomes (or floats, or None); `reward(item: RewardItem)` ->
  one of these.

Each may be a coroutine function. The batch forms see whole groups: one call per group.

Attributes of a function say more about it. `wants` names the parts of items that it reads and that are not sent
otherwise: `ids`, `messages`, `offsets`, `turns`, `images`. Without it, functions of TRL's form that take
`completion_ids`, and those of ours, get `ids`. `deterministic` is true if equal items get equal scores. `needs_group`
is false for a batch form that scores each item by itself: it may be given parts of a group.

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
from rollmesh.reward_service.adapters.results import failure, read_batch, read_entry, read_scores
from rollmesh.reward_service.function_kind import WANTS, FunctionKind
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, checked_outcome
from rollmesh.reward_service.scorers import ItemScorer

Call = Callable[[Sequence[RewardItem]], Any]
Read = Callable[[Sequence[RewardItem], Any], list[Outcome]]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """An adapted reward function.

    Attributes:
        name: for components and errors.
        whole_group: it is given all items of a group that a request holds; otherwise one item per call.
        asynchronous: `call` returns an awaitable of the outcomes.
        call: items -> what the user's function returned.
        read: (items, what it returned) -> one outcome per item.
        wants, deterministic, needs_group: see `FunctionKind`.
    """

    name: str
    whole_group: bool
    asynchronous: bool
    call: Call
    read: Read
    wants: frozenset[str] = frozenset()
    deterministic: bool = False
    needs_group: bool = False

    @property
    def kind(self) -> FunctionKind:
        """Its description for those that cannot call it."""
        wants = tuple(sorted(self.wants))
        return FunctionKind(self.whole_group, self.asynchronous, wants, self.deterministic, self.needs_group)

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
    """A built-in scorer: of one item, without its tokens, and deterministic unless its attribute denies it."""
    return RewardFunction(
        name,
        False,
        False,
        lambda items: [scorer(items[0])],
        lambda _items, outcomes: outcomes,
        _wants(name, scorer, frozenset()),
        bool(getattr(scorer, "deterministic", True)),
    )


def adapt(name: str, function: Callable[..., Any]) -> RewardFunction:
    """Recognizes the signature of a user's function.

    Raises:
        RewardError: none of the signatures fits, or it wants something that there is not.
    """
    try:
        signature = Signature.of(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward function {name}: its signature cannot be read: {error}") from error
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the bound method is wanted, not callability
    )
    deterministic = bool(getattr(function, "deterministic", False))

    def adapted(whole_group: bool, call: Call, read: Read, *wants: str) -> RewardFunction:
        wanted = _wants(name, function, frozenset(wants))
        needs_group = whole_group and bool(getattr(function, "needs_group", True))
        return RewardFunction(name, whole_group, asynchronous, call, read, wanted, deterministic, needs_group)

    parameters = signature.parameters
    if trl.MARK in parameters:
        any_column = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        reads_ids = ("ids",) if any_column or trl.IDS in parameters else ()
        return adapted(True, partial(trl.call, signature), trl.read, *reads_ids)
    if parameters.keys() >= verl.SINGLE:
        return adapted(False, partial(verl.call_single, signature), verl.read_single)
    if parameters.keys() >= verl.BATCH:
        return adapted(True, partial(verl.call_batch, signature), read_scores)
    if parameters.keys() >= openrlhf.MARKS:
        return adapted(True, partial(openrlhf.call, signature), openrlhf.read)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if needed == ["items"]:
        return adapted(True, function, read_batch, "ids")
    if needed == ["item"]:
        return adapted(False, lambda items: function(items[0]), lambda _items, value: [read_entry(value)], "ids")
    raise RewardError(
        f"reward function {name}{inspect.signature(function)} has no known signature",
        hint="write compute_score(data_source, solution_str, ground_truth, extra_info), "
        "reward(prompts, completions, **columns), reward(items) or reward(item); docs/peer-rewards.md lists all forms",
    )


def _wants(name: str, function: Callable[..., Any], default: frozenset[str]) -> frozenset[str]:
    wants = getattr(function, "wants", None)
    if wants is None:
        return default
    named = frozenset([wants] if isinstance(wants, str) else wants)
    if unknown := named - WANTS:
        raise RewardError(
            f"reward function {name} wants {', '.join(sorted(map(str, unknown)))}",
            hint=f"its attribute `wants` may name {', '.join(sorted(WANTS))}",
        )
    return named
