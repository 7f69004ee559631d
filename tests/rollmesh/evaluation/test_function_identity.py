"""Reward functions of a program: the same where they judge the same, as far as their code and their values say."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rollmesh.evaluation.function_identity import function_identity
from tests.repository import REPOSITORY

Reward = Callable[..., Any]
_WORDS = frozenset({"one", "two", "three", "four"})


def _bonus(text: str) -> float:
    return 0.5 if text in _WORDS else 0.0


def scaled(scale: float, names: Any = ()) -> Reward:
    def score(solution: str) -> float:
        return scale * len(solution) + _bonus(solution) + len(names)

    return score


def plain(solution: str, base: float = 1.0) -> float:
    return base + len(solution)


class Judge:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, solution: str) -> float:
        return self.scale * len(solution)

    def method(self, solution: str) -> float:
        return self(solution)


def recursive(solution: str) -> float:
    return 1.0 + recursive(solution[1:]) if solution else 0.0


def made() -> list[Reward]:
    """Functions that judge differently, made again at each call."""
    return [
        scaled(1.0),
        scaled(2.0),
        scaled(1.0, {"a": 1}),
        scaled(1.0, ["a"]),
        plain,
        functools.partial(plain, base=2.0),
        functools.partial(plain, base=3.0),
        Judge(1.0),
        Judge(2.0),
        Judge(2.0).method,
        recursive,
        lambda solution: len(solution),
        lambda solution: len(solution) + 1,
        len,
        max,
    ]


def test_functions_that_judge_differently_are_told_apart_and_equal_ones_are_not() -> None:
    first, second = map(function_identity, made()), map(function_identity, made())
    names = list(first)
    assert names == list(second)
    assert len(set(names)) == len(names)
    assert names[4].startswith("plain:")


def test_what_a_function_uses_of_its_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = function_identity(scaled(1.0))
    monkeypatch.setattr(f"{__name__}._WORDS", frozenset({"one"}))
    assert function_identity(scaled(1.0)) != before
    monkeypatch.undo()
    monkeypatch.setattr(f"{__name__}._bonus", plain)
    assert function_identity(scaled(1.0)) != before


def test_another_process_finds_the_same() -> None:
    ask = f"import json, {__name__} as m; print(json.dumps([*map(m.function_identity, m.made())]))"
    done = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert json.loads(done.stdout) == list(map(function_identity, made()))
