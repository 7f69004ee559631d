"""Grade-school math: the number that the response gives as its answer, compared as a number.

It is the one after the last `####`, or else in the last `\\boxed{}`, or else after the last phrase like `the answer
is`. These are known in many languages. Without any of them it is the last number. After a calculation, `2 * 21 = 42`,
its result counts.

Components: `correct` (the reward) and `format` (whether `####` introduced the answer), both 0 or 1.
"""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from rollmesh.mesh.chat.thoughts import after_thoughts
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.announcements import announced
from rollmesh.reward_service.scorers.boxes import last_braced_box, one_answer
from rollmesh.reward_service.scorers.numbers import LONGEST, NUMBER, parse_number, plain_marks
from rollmesh.reward_service.scorers.truths import TruthError, compares_with, shown

_MARK = "####"
# Phrases count in so many last characters.
_TAIL = 4000
# A number with spaces between its thousands, or a fraction.
_WIDE = re.compile(r"[-+]?(?:\d{1,3}(?: \d{3})+(?:\.\d+)?|\d+ ?/ ?\d+)(?![\d/])")
_MIXED = re.compile(r"(\d{1,9}) (\d{1,9}) ?/ ?([1-9]\d{0,8})(?![\d/])")
_FRACTION = re.compile(r"(\d?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
# Spellings of numbers, and what is read in their places.
_SIGN_BEFORE_CURRENCY = re.compile(r"([-+])\\?[$€£¥] ?(?=[\d.])")
_SIGN_OF_FRACTION = re.compile(r"(\d?)([¼-¾⅐-⅞])")
_DIGIT = re.compile(r"[\d¼-¾⅐-⅞]")
_TEN = r"10 ?(?:\^|\*\*) ?(?:\{ ?([-+]?\d{1,3}) ?\}|([-+]?\d{1,3}))"
_POWER = re.compile(rf"(\d) ?(?:\\times|\\cdot|[×x*·]) ?{_TEN}")
_POWER_ALONE = re.compile(rf"(?<![\w.,^)]){_TEN}")
_APOSTROPHES = re.compile(r"(?<![\d.,])\d{1,3}(?:['’]\d{3})+(?!\d)")
# A comma that no thousands follow, and dots that thousands follow.
_DECIMAL_COMMA = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+|\d+),(\d{1,2}|\d{4,}|(?<=\.\d{3},)\d{3})(?![\d.,]*\d)")
_BETWEEN = r"\)? ?(?:[-+*/×÷·^]|\\times|\\cdot|\\div) ?\(?\$?\d"
_OPERATOR = re.compile(rf"\d{_BETWEEN}")
_CALCULATION = re.compile(rf"[-+]?[\d,.]+{_BETWEEN}[^=]{{0,200}}=")
_AT_ONCE = re.compile(r"(?:is|about|only|equal to|just|the|number|[\s*_$€£¥\\(\[:=~≈]){0,12}[-+]?\.?\d")


def number_of(truth: Any) -> Fraction:
    """The number that a truth is, or that its solution ends with after `####`.

    Raises:
        TruthError: it is none.
    """
    value = parse_number(one_answer(truth).rpartition(_MARK)[2])
    if value is None:
        raise TruthError(
            f"the ground truth holds no number: {shown(truth)}; give a number, or a solution with #### in it"
        )
    return value


@compares_with(number_of)
def score(item: RewardItem, truth: Fraction) -> Outcome:
    """1.0 or 0.0; unscorable where the ground truth holds no number. Full solutions are accepted as ground truth."""
    said = after_thoughts(item.response)
    answer = _answer(said)
    if answer is None and said != item.response:
        answer = _answer(item.response)
    correct = float(answer == truth)
    components = {"correct": correct, "format": float(_MARK in item.response)}
    return Scored(correct, components, answer="" if answer is None else str(answer))


def _answer(response: str) -> Fraction | None:
    """The number that is said most clearly to be the answer; None without a number."""
    text = _SIGN_BEFORE_CURRENCY.sub(r"\1", plain_marks(response))
    announced_number = next((number for place in _places(text) if (number := _number(place)) is not None), None)
    return _last_number(text) if announced_number is None else announced_number


def _places(text: str) -> Iterator[str]:
    """Texts that are said to be the answer, those that say so most clearly first."""
    yield from reversed(text.split(_MARK)[1:])
    tail = text[-_TAIL:]
    if (boxed := last_braced_box(tail)) is not None:
        yield boxed
    # In `the answer is that each of the 3 gets 14` the number is not what is announced.
    yield from (text for _, text in reversed(announced(tail)) if _AT_ONCE.match(text))


def _number(text: str) -> Fraction | None:
    """The number with which a text that is an answer begins: the result of a calculation, else its first number."""
    line = next(filter(_DIGIT.search, text.split("\n", 20)), None)
    if line is None:
        return None
    line = _plain_numbers(line[:LONGEST])
    number = NUMBER.search(line)
    if number is not None and _CALCULATION.match(line, number.start()):
        results = [side for side in line.split("=")[1:] if not _OPERATOR.search(side) and NUMBER.search(side)]
        line = results[-1] if results else line
        number = NUMBER.search(line)
    if number is None:
        return None
    if (mixed := _MIXED.match(line, number.start())) is not None:
        return int(mixed[1]) + Fraction(int(mixed[2]), int(mixed[3]))
    wide = _WIDE.match(line, number.start())
    return parse_number((wide or number)[0])


def _plain_numbers(line: str) -> str:
    """A line whose numbers are spelled as `numbers` knows them."""
    line = _FRACTION.sub(lambda part: f"{part[1]}{' ' * bool(part[1])}{part[2]}/{part[3]}", line).replace("{,}", ",")
    line = _SIGN_OF_FRACTION.sub(
        lambda part: f"{part[1]}{' ' * bool(part[1])}{unicodedata.normalize('NFKC', part[2]).replace('⁄', '/')}", line
    )
    line = _POWER.sub(lambda power: f"{power[1]}e{power[2] or power[3]}", line)
    line = _POWER_ALONE.sub(lambda power: f"1e{power[1] or power[2]}", line)
    line = _APOSTROPHES.sub(lambda number: re.sub("['’]", "", number[0]), line)
    return _DECIMAL_COMMA.sub(lambda number: f"{number[1].replace('.', '')}.{number[2]}", line)


def _last_number(text: str) -> Fraction | None:
    numbers = NUMBER.findall(text)
    return parse_number(numbers[-1]) if numbers else None
