"""Reward functions in one form, whatever signature they were written with.

Three signatures are accepted unchanged, distinguished by their parameter names:

* verl: `compute_score(data_source, solution_str, ground_truth, extra_info)` -> float, or dict with "score" (and "spans",
  rewards of parts);
* TRL: `reward(prompts, completions, completion_ids, **columns)` -> list of floats, None where unscorable;
* ours: `reward(items: Sequence[RewardItem])` -> list of outcomes (or floats, or None).

Each may be a coroutine function. The batch forms see whole groups: one call per group.

Attributes of a function say more about it. `wants` names the parts of items that it reads and that are not sent
otherwise: `ids`, `messages`, `offsets`. Without it, functions of TRL's form that take `completion_ids`, and those of
ours, get `ids`. `deterministic` is true if equal items get equal scores.
Invariant: an adapted function returns one outcome per item or raises.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.reward_service.function_kind import WANTS, FunctionKind
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored, Unscorable, checked_outcome
from rollmesh.reward_service.scorers import ItemScorer

log = logging.getLogger(__name__)
Call = Callable[[Sequence[RewardItem]], Any]
Read = Callable[[Sequence[RewardItem], Any], list[Outcome]]


class OutputError(RewardError):
    """A reward function returned something that is no reward."""

    code = "bad_output"


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """An adapted reward function.

    Attributes:
        name: for components and errors.
        whole_group: it is given all items of a group that a request holds; otherwise one item per call.
        asynchronous: `call` returns an awaitable of the outcomes.
        call: items -> what the user's function returned.
        read: (items, what it returned) -> one outcome per item.
        wants, deterministic: see `FunctionKind`.
    """

    name: str
    whole_group: bool
    asynchronous: bool
    call: Call
    read: Read
    wants: frozenset[str] = frozenset()
    deterministic: bool = False

    @property
    def kind(self) -> FunctionKind:
        """Its description for those that cannot call it."""
        return FunctionKind(self.whole_group, self.asynchronous, tuple(sorted(self.wants)), self.deterministic)

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
        if isinstance(error, PayloadError):
            return Failed("bad_input", f"{self.name}: {error}")
        if isinstance(error, OutputError):
            return Failed("bad_output", f"{self.name}: {error}")
        log.debug("reward function %s raised", self.name, exc_info=error)
        # A failed connection or file access may pass; a bug in the function does not.
        transient = isinstance(error, OSError)
        return Failed("exception", f"{self.name} raised {type(error).__name__}: {error}", retryable=transient)

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
        RewardError: none of the three signatures fits, or it wants something that there is not.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward function {name}: its signature cannot be read: {error}") from error
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the bound method is wanted, not callability
    )
    deterministic = bool(getattr(function, "deterministic", False))

    def adapted(whole_group: bool, call: Call, read: Read, *wants: str) -> RewardFunction:
        wanted = _wants(name, function, frozenset(wants))
        return RewardFunction(name, whole_group, asynchronous, call, read, wanted, deterministic)

    if "completions" in parameters:
        any_column = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        reads_ids = ("ids",) if any_column or "completion_ids" in parameters else ()
        return adapted(True, _trl_call(function, parameters), _read_batch, *reads_ids)
    if {"solution_str", "ground_truth"} <= parameters.keys():
        return adapted(False, _verl_call(function, parameters), _read_verl)
    if [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD] == ["items"]:
        return adapted(True, function, _read_batch, "ids")
    raise RewardError(
        f"reward function {name}{inspect.signature(function)} has no known signature",
        hint="write compute_score(data_source, solution_str, ground_truth, extra_info), "
        "reward(prompts, completions, **columns) or reward(items)",
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


# ---------------------------------------------------------------------------------------------- calling


def _accepts(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function takes, by keyword."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def _require(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    for parameter in parameters.values():
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variable and parameter.name not in given:
            raise PayloadError(
                parameter.name,
                f"the function requires it, but the data has only: {', '.join(sorted(given))}",
                hint="add it to extra_info of the dataset's rows",
            )


def _verl_call(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Call:
    def call(items: Sequence[RewardItem]) -> Any:
        (item,) = items
        given = {
            "data_source": item.data_source,
            "solution_str": item.response,
            "ground_truth": item.ground_truth,
            "extra_info": dict(item.extra_info),
        }
        _require(parameters, given)
        return function(**_accepts(parameters, given))

    return call


def _trl_call(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Call:
    def call(items: Sequence[RewardItem]) -> Any:
        given = _trl_arguments(items)
        _require(parameters, given)
        return function(**_accepts(parameters, given))

    return call


def _trl_arguments(items: Sequence[RewardItem]) -> dict[str, Any]:
    """Keyword arguments as TRL's trainer passes them: every column a list with one entry per item.

    Prompts and completions are strings, or message lists where the dataset's prompt was one (the row's
    extra_info then carries it as `prompt_messages`).
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
        "completion_ids": [list(item.response_ids) for item in items],
        "data_source": [item.data_source for item in items],
        "ground_truth": [item.ground_truth for item in items],
        "extra_info": [dict(item.extra_info) for item in items],
        "trainer_state": None,
        "log_extra": _ignore,
        "log_metric": _ignore,
    }


def _ignore(name: str, value: Any) -> None:
    """Ignores TRL's logging hooks: this mesh logs components."""
    log.debug("reward function logged %s = %s", name, value)


# ---------------------------------------------------------------------------------------------- reading results


def _number(value: Any) -> float:
    """A float from a number, a bool, or a zero-dimensional array or tensor.

    Raises:
        OutputError: for anything else.
    """
    if isinstance(value, str | bytes):
        raise OutputError(f"returned {value!r}, expected a number")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OutputError(f"returned {type(value).__name__}, expected a number") from error


def _read_verl(_items: Sequence[RewardItem], value: Any) -> list[Outcome]:
    if not isinstance(value, Mapping):
        return [_read_entry(value)]
    if "score" not in value:
        raise OutputError(f"returned a dict without 'score': {sorted(map(str, value))}")
    components = {
        str(key): float(part) for key, part in value.items() if key != "score" and isinstance(part, int | float)
    }
    return [Scored(_number(value["score"]), components, spans=_spans(value.get("spans")))]


def _spans(value: Any) -> tuple[tuple[int, int, float], ...]:
    """Rewards of parts: a list of (begin, end, value), in characters of the response.

    Raises:
        OutputError: for anything else.
    """
    try:
        return tuple((int(begin), int(end), float(number)) for begin, end, number in value or ())
    except (TypeError, ValueError) as error:
        raise OutputError(f"returned spans that are no list of (begin, end, value): {error}") from error


def _read_batch(items: Sequence[RewardItem], values: Any) -> list[Outcome]:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise OutputError(f"returned {type(values).__name__}, expected one reward per item")
    if len(values) != len(items):
        raise OutputError(f"returned {len(values)} rewards for {len(items)} items")
    return [_read_entry(value) for value in values]


def _read_entry(value: Any) -> Outcome:
    if isinstance(value, Scored | Unscorable | Failed):
        return value
    if value is None:
        return Unscorable("the function returned None")
    return Scored(_number(value))
