"""Small problems: additions, string manipulations and programs, as dataset rows with verl's fields.

Invariant: problems are distinct, so training and held-out rows have none in common; the same seed gives the same rows.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Task = Literal["arithmetic", "strings", "both", "code"]

LETTERS = "abcdefgh"
_STRING_LENGTH = 4
_STRING_PROBLEMS = 800
_MANIPULATIONS: dict[str, Callable[[str], str]] = {
    "copy": lambda text: text,
    "rev": lambda text: text[::-1],
    "rot": lambda text: text[1:] + text[:1],
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and a response that is right, the only one unless there are tests.

    Attributes:
        tests: of a program, as the scorer `code` reads them; empty for other problems.
    """

    source: str
    ability: str
    prompt: str
    answer: str
    tests: str = ""

    def row(self, index: int, split: str) -> dict[str, Any]:
        """The problem as a dataset row."""
        return {
            "data_source": self.source,
            "prompt": self.prompt,
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": self.tests or self.answer},
            "extra_info": {"split": split, "index": index},
        }


def split_problems(task: Task, *, largest_digit: int, held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """All problems of a task, shuffled and split.

    Args:
        largest_digit: of the operands of additions; up to 4 nothing is carried, 9 gives all pairs.
        held_out: problems kept for evaluation.

    Returns:
        (training problems, held-out problems), without a problem in common.
    """
    problems: list[Problem] = []
    rng = random.Random(seed)
    if task == "code":
        problems += programs()
    if task in ("arithmetic", "both"):
        problems += additions(largest_digit)
    if task in ("strings", "both"):
        problems += manipulations(rng)
    rng.shuffle(problems)
    return problems[held_out:], problems[:held_out]


def additions(largest_digit: int) -> Iterator[Problem]:
    """`23+14=` -> `37`, for all pairs of two-digit operands (`04` is one) without a digit above `largest_digit`."""
    digits = range(largest_digit + 1)
    operands = [10 * tens + units for tens, units in itertools.product(digits, repeat=2)]
    for left, right in itertools.product(operands, repeat=2):
        yield Problem("demo/arithmetic", "math", f"{left:02d}+{right:02d}=", f"{left + right:02d}")


def manipulations(rng: random.Random) -> Iterator[Problem]:
    """`rev:abcd=` -> `dcba` and the like, for random strings."""
    seen: set[tuple[str, str]] = set()
    while len(seen) < _STRING_PROBLEMS:
        name = rng.choice(sorted(_MANIPULATIONS))
        text = "".join(rng.choices(LETTERS, k=_STRING_LENGTH))
        if (name, text) not in seen:
            seen.add((name, text))
            yield Problem("demo/strings", "strings", f"{name}:{text}=", _MANIPULATIONS[name](text))


def programs() -> Iterator[Problem]:
    """`13,15=` -> a program that gives 13 for 0, 15 for 1, and so on; nothing is carried from one to the next.

    Many programs do. The tests also ask for values that the prompt does not show.
    """
    for tens, units in itertools.product(range(10), repeat=2):
        for step in range(1, 10 - units):
            first = 10 * tens + units
            answer = f"print(int(input())*{step}+{first})"
            cases = {"inputs": ["7", "0", "1"], "outputs": [str(first + n * step) for n in (7, 0, 1)]}
            yield Problem("demo/code", "code", f"{first:02d},{first + step:02d}=", answer, json.dumps(cases))
