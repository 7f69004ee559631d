r"""Published datasets: the contents of their rows, and how a problem is made of one.

Each recipe reads the forms in which its dataset is published. Its instruction says how a response gives its answer, so
that the scorer of its `data_source` finds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollmesh.mesh.errors import DataError
from rollmesh.reward_service.scorers.boxes import last_boxed

PublishedRecord = Mapping[str, Any]


class UnusableRecordError(Exception):
    """A record that no problem can be made of; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its answer.

    Attributes:
        question: as published, without instructions.
        answer: the ground truth.
        about: level, subject and the like, as texts.
        images: of the question, as published.
    """

    question: str
    answer: str
    about: Mapping[str, str] = field(default_factory=dict)
    images: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """The way from a published dataset to rows.

    Attributes:
        data_source: of its rows.
        ability: of its rows.
        instruction: follows the question in every prompt.
        published: the form of its files, for errors.
        read: makes a problem of a record.
        about: fields of a record that its row keeps as texts, in `extra_info`.
        with_images: problems have images.
        reward: the setting that scores it; empty where `auto` knows its source.
        preamble: stands before the question in every prompt.
    """

    data_source: str
    ability: str
    instruction: str
    published: str
    read: Callable[[PublishedRecord], Problem]
    reward: str = ""
    preamble: str = ""
    about: tuple[str, ...] = ()
    with_images: bool = False

    def problem(self, record: PublishedRecord) -> Problem:
        """The problem of a record, with what its row keeps of it.

        Raises:
            UnusableRecordError: it has none.
        """
        kept = {name: str(record[name]) for name in self.about if record.get(name) is not None}
        return replace(self.read(record), about=kept)

    def prompt(self, problem: Problem) -> list[dict[str, str]]:
        """The chat messages of a problem."""
        parts = [part for part in (self.preamble, problem.question, self.instruction) if part]
        return [{"role": "user", "content": "\n\n".join(parts)}]


def recipe_named(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        DataError: there is none.
    """
    if name not in RECIPES:
        raise DataError(f"no dataset is called {name!r}", hint=f"known: {', '.join(RECIPES)}")
    return RECIPES[name]


def _given(record: PublishedRecord, *names: str) -> Any:
    """The first of these fields that a record has, whatever its case.

    Raises:
        UnusableRecordError: it has none.
    """
    lower = {key.lower(): value for key, value in record.items()}
    value = next((lower[name] for name in names if lower.get(name) is not None), None)
    if value is None:
        raise UnusableRecordError(f"no field {' or '.join(f'`{name}`' for name in names)}")
    return value


def _text(record: PublishedRecord, *names: str) -> str:
    text = str(_given(record, *names)).strip()
    if not text:
        raise UnusableRecordError(f"field `{names[0]}` is empty")
    return text


def _gsm8k(record: PublishedRecord) -> Problem:
    """The solution ends with `#### 1,234`."""
    _, mark, answer = _text(record, "answer").rpartition("####")
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise UnusableRecordError("the answer has no #### before its number")
    return Problem(_text(record, "question"), answer)


def _math(record: PublishedRecord) -> Problem:
    r"""The answer is given (MATH-500), or the last `\boxed{}` of the solution (Hendrycks et al., arXiv:2103.03874)."""
    if record.get("answer") is not None:
        return Problem(_text(record, "problem"), _text(record, "answer"))
    answer = (last_boxed(_text(record, "solution")) or "").strip()
    if not answer:
        raise UnusableRecordError(r"the solution has no \boxed{}")
    return Problem(_text(record, "problem"), answer)


_DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
_DAPO_TAIL = 'Remember to put your answer on its own line after "Answer:".'


def _dapo_math(record: PublishedRecord) -> Problem:
    """verl's rows, whose prompts have the instruction; it is taken off, and stands in every prompt again later."""
    if "reward_model" not in record:
        return Problem(_text(record, "problem", "question", "prompt"), _text(record, "answer", "solution"))
    prompt, reward = _given(record, "prompt"), _given(record, "reward_model")
    try:
        question, answer = str(prompt[0]["content"]), str(reward["ground_truth"]).strip()
    except (LookupError, TypeError) as error:
        raise UnusableRecordError("prompt or reward_model has not verl's form") from error
    question = question.strip().removeprefix(_DAPO_HEAD).removesuffix(_DAPO_TAIL).strip()
    if not question or not answer:
        raise UnusableRecordError("the question or the answer is empty")
    return Problem(question, answer)


def _aime(record: PublishedRecord) -> Problem:
    """Published by several hands: `problem` or `question`, `answer` in any case; or verl's rows."""
    if "reward_model" in record:
        return _dapo_math(record)
    answer = _text(record, "answer").removesuffix("^\\circ")
    # Answers are whole numbers of up to three digits; some files write 033.
    answer = str(int(answer)) if answer.isdecimal() else answer
    return Problem(_text(record, "problem", "question"), answer)


def _geo3k(record: PublishedRecord) -> Problem:
    images = _given(record, "images")
    if not isinstance(images, list) or not images:
        raise UnusableRecordError("field `images` is no list of images")
    question = _text(record, "problem")
    missing = len(images) - question.count("<image>")
    return Problem("<image>" * max(0, missing) + question, _text(record, "answer"), images=images)


def _countdown(record: PublishedRecord) -> Problem:
    """Numbers and a target. The ground truth is JSON of both, for a reward function of the user's."""
    try:
        numbers, target = [int(number) for number in _given(record, "nums", "numbers")], int(_given(record, "target"))
    except (TypeError, ValueError) as error:
        raise UnusableRecordError("nums or target is no number") from error
    question = f"Using each of the numbers {numbers} at most once, and + - * /, write an equation that equals {target}."
    return Problem(question, json.dumps({"numbers": numbers, "target": target}))


_BOX = r"Let's think step by step and output the final answer within \boxed{}."

RECIPES: Mapping[str, Recipe] = {
    "gsm8k": Recipe(
        "openai/gsm8k",
        "math",
        'Let\'s think step by step and output the final answer after "####".',
        "`question` and `answer`, which ends with #### and the number (openai/gsm8k)",
        _gsm8k,
    ),
    "math": Recipe(
        "math",
        "math",
        _BOX,
        r"`problem`, and `solution` with \boxed{} (Hendrycks) or `answer` (MATH-500)",
        _math,
        about=("level", "type", "subject", "unique_id"),
    ),
    "dapo_math": Recipe(
        "math_dapo",
        "math",
        _DAPO_TAIL,
        "verl's rows (BytedTsinghua-SIA/DAPO-Math-17k), or `problem` and `answer`",
        _dapo_math,
        preamble=_DAPO_HEAD,
    ),
    "aime": Recipe(
        "aime",
        "math",
        _DAPO_TAIL,
        "`problem` or `question`, and `answer` (AIME 2024, AIME 2025), or verl's rows",
        _aime,
        preamble=_DAPO_HEAD,
        about=("id", "year", "url"),
    ),
    "geo3k": Recipe(
        "hiyouga/geometry3k",
        "geometry",
        _BOX,
        "`images`, `problem` and `answer` (hiyouga/geometry3k)",
        _geo3k,
        "reward.by_data_source={hiyouga/geometry3k: [math]}",
        with_images=True,
    ),
    "countdown": Recipe(
        "countdown",
        "math",
        "Show your work, and write the equation within <answer> </answer>.",
        "`nums` and `target` (Jiayi-Pan/Countdown-Tasks-3to4)",
        _countdown,
        "reward.by_data_source={countdown: ['FILE.py:FUNCTION']}: the ground truth is JSON {numbers, target}",
    ),
}
"""By the names that `rollmesh data prepare` takes."""
