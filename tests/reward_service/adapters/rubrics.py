"""Reward functions in verifiers' form, without the package: what a rubric's attributes are is all that matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Parser:
    def parse_answer(self, completion: Any) -> str:
        return str(completion[-1]["content"]).removeprefix("<answer>").partition("</answer>")[0]


class Rubric:
    def __init__(self, funcs: list[Callable[..., Any]], weights: list[float], **objects: Any) -> None:
        self.funcs = funcs
        self.weights = weights
        self.class_objects = {"parser": Parser(), **objects}


class RubricGroup:
    def __init__(self, rubrics: list[Any]) -> None:
        self.funcs: list[Any] = []
        self.rubrics = rubrics


class OwnScoring(Rubric):
    async def score_group(self, states: list[Any]) -> None:
        raise NotImplementedError


def exact(completion: Any, answer: Any, parser: Any, **_kwargs: Any) -> float:
    return float(parser.parse_answer(completion) == answer)


async def of_the_row(completion: Any, info: Any, task: Any, state: Any) -> float:
    assert state["prompt"] == [{"role": "user", "content": "q"}]
    assert (info["k"], task) == (1, "source")
    return 0.5


def longest(completions: Any, answers: Any) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def fails_for_wrong(completion: Any) -> float:
    if "wrong" in completion[-1]["content"]:
        raise ValueError("no score")
    return 1.0


def rubric(bonus: float = 0.2) -> RubricGroup:
    first = Rubric([exact, of_the_row, fails_for_wrong], [1.0, bonus, 0.0])
    return RubricGroup([first, Rubric([longest], [0.1])])


partly = Rubric([fails_for_wrong], [1.0])
own = OwnScoring([exact], [1.0])
empty = Rubric([], [])


class Environment:
    message_type = "completion"
    rubric = Rubric([lambda completion, answer: float(completion == answer)], [1.0])


environment = Environment()
