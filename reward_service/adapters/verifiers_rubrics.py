"""Rubrics of verifiers 0.1.x: weighted functions over `prompt`, `completion`, `answer`, `state`, `info` and `task`.

The functions are called from here, with what the rubric gives them. The rubric itself would make a reward of 0 of what
a function raises; here that is an error. A function of weight 0 is a metric: one that fails is left out.
Source: verifiers 0.1.14, `verifiers/rubrics/rubric.py`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_origin

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.adapters.arguments import Signature
from rollmesh.reward_service.adapters.results import as_list, failure, number
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored

_OF_GROUPS = frozenset({"states", "prompts", "completions", "answers", "tasks", "infos"})
_OWN_SCORING = ("score_rollout", "score_group")


@dataclass(frozen=True, slots=True)
class _Weighted:
    name: str
    weight: float
    signature: Signature
    of_group: bool
    objects: dict[str, Any]


class RubricReward:
    """The sum of a rubric's functions, called for a whole group.

    Args:
        rubric: of verifiers; a group of rubrics is the sum of them.
        chat: prompts and completions are lists of messages; else texts.

    Raises:
        RewardError: it has no functions, or scores in a way of its own.
    """

    wants = ()

    def __init__(self, rubric: Any, *, chat: bool) -> None:
        self._chat = chat
        self._functions = [function for part in _flat(rubric) for function in _functions_of(part)]
        if not self._functions:
            raise RewardError(f"{type(rubric).__name__} has no reward functions", hint="add some to the rubric")

    async def __call__(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Scores the items, which are of one group."""
        states = [self._state(item) for item in items]
        columns = await asyncio.gather(*(_column(function, states) for function in self._functions))
        return [self._outcome([column[row] for column in columns]) for row in range(len(items))]

    def _outcome(self, values: Sequence[float | Failed]) -> Outcome:
        total = 0.0
        components: dict[str, float] = {}
        for function, value in zip(self._functions, values, strict=True):
            if not isinstance(value, Failed):
                components[function.name] = components.get(function.name, 0.0) + value
                total += function.weight * value
            elif function.weight:
                return value
        return Scored(total, components)

    def _state(self, item: RewardItem) -> dict[str, Any]:
        prompt: Any = item.prompt
        completion: Any = item.response
        if self._chat:
            prompt = item.extra_info.get("prompt_messages") or [{"role": "user", "content": item.prompt}]
            completion = [{"role": "assistant", "content": item.response}]
        row = dict(item.extra_info)
        step = {"prompt": prompt, "completion": completion, "response": None, "reward": None, "advantage": None}
        return {
            "input": row,
            "prompt": prompt,
            "completion": completion,
            "answer": "" if item.ground_truth is None else item.ground_truth,
            "info": row.get("info", row),
            "task": item.data_source,
            "trajectory": [step],
            "is_completed": True,
            "is_truncated": item.finish_reason == "length",
        }


def _flat(rubric: Any) -> Iterator[Any]:
    """The rubrics of a group of them, or the rubric itself.

    Raises:
        RewardError: one scores in a way of its own.
    """
    if inner := getattr(rubric, "rubrics", None):
        for part in inner:
            yield from _flat(part)
        return
    for name in _OWN_SCORING:
        method = getattr(type(rubric), name, None)
        if method is not None and not method.__module__.startswith("verifiers.rubrics.rubric"):
            raise RewardError(
                f"{type(rubric).__name__} scores by a method of its own ({name})",
                hint="name a rubric of functions, or write reward(items) that calls the method",
            )
    yield rubric


def _functions_of(rubric: Any) -> Iterator[_Weighted]:
    objects = dict(getattr(rubric, "class_objects", None) or {"parser": getattr(rubric, "parser", None)})
    for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
        signature = Signature.of(function)
        name = str(getattr(function, "__name__", type(function).__name__))
        yield _Weighted(name, float(weight), signature, _is_of_group(function, signature), objects)


def _is_of_group(function: Callable[..., Any], signature: Signature) -> bool:
    returned = inspect.signature(function).return_annotation
    return bool(signature.parameters.keys() & _OF_GROUPS) or returned is list or get_origin(returned) is list


async def _column(function: _Weighted, states: Sequence[dict[str, Any]]) -> list[float | Failed]:
    """The values of a function for each state; an exception fails the states of that call."""
    if not function.of_group:
        return await asyncio.gather(*(_value(function, state) for state in states))
    given = {f"{key}s": [state[key] for state in states] for key in ("prompt", "completion", "answer", "task", "info")}
    try:
        answer = as_list(await _called(function, {**given, "states": states}), len(states))
        return [number(value) for value in answer]
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        return [failure(function.name, error)] * len(states)


async def _value(function: _Weighted, state: dict[str, Any]) -> float | Failed:
    own = {key: state[key] for key in ("prompt", "completion", "answer", "info", "task")}
    try:
        return number(await _called(function, {**state["input"], **own, "state": state}))
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        return failure(function.name, error)


async def _called(function: _Weighted, given: dict[str, Any]) -> Any:
    answer = function.signature.call({**given, **function.objects})
    return await answer if inspect.isawaitable(answer) else answer
