r"""Mathematics, compared by value: math-verify reads both answers (LaTeX or plain), sympy decides whether they agree.

Fractions, decimals, intervals, sets, equations and symbolic expressions are understood. There are expressions that no
computer has the time to evaluate: the deadline of the call ends them, with the process. (The library's own time limits
cannot: a big power is one instruction, in which no signal is heard.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers.announcements import after_thoughts
from rollmesh.reward_service.scorers.boxes import last_boxed, last_braced_box, one_answer
from rollmesh.reward_service.scorers.math_equality import agree, spelled
from rollmesh.reward_service.scorers.math_reading import spelled_answer, spelled_response, with_closed_box
from rollmesh.reward_service.scorers.truths import compares_with, shown

Reading = Literal["any", "expression_first", "latex", "box"]
# A response may continue for this long after its last box; later text would be read together with it.
_BOX_TAIL = 1000
_NO_TIMEOUT = 0
# Formulas of so many characters at most whose meaning is kept. The library keeps 20, and a batch has more truths.
_KEPT_FORMULAS, _KEPT_LENGTH = 4096, 256
# Each worker would write that these time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a response.

    Attributes:
        readable_truth: False where the ground truth could not be read: nothing follows for the response.
        boxed: it has a box.
        readable: an answer was found in it and could be read.
        correct: it agrees with the truth.
    """

    readable_truth: bool
    boxed: bool
    readable: bool
    correct: bool


def grade(response: str, truth: str, *, boxed_truth: bool = True, reading: Reading = "any") -> Grade:
    r"""Compares a response with the truth.

    Args:
        response: the text.
        truth: the answer, in LaTeX or plain.
        boxed_truth: read the truth as the content of a `\boxed{}`, which is all LaTeX. Else it is free text, in which
            only an anchored formula or a plain number counts.
        reading: `any` and `expression_first` take boxes, formulas and plain expressions, in that order or with
            expressions first. `latex` takes formulas alone, boxes before others; `box` takes the last box.
    """
    from math_verify import verify

    expected = _parse(rf"\boxed{{{truth}}}" if boxed_truth else truth, "any")
    start = response.rfind(r"\boxed{")
    if reading == "box":
        tail = response[start:] if start >= 0 else ""
        found = _parse(tail, "any") if last_boxed(tail) and len(tail) <= _BOX_TAIL else []
    else:
        found = _parse(response, reading)
    correct = bool(expected and found) and verify(expected, found, timeout_seconds=_NO_TIMEOUT)
    return Grade(bool(expected), start >= 0, bool(found), correct)


@compares_with(one_answer)
def score(item: RewardItem, truth: str) -> Outcome:
    """1.0 or 0.0; unscorable without a ground truth that can be read."""
    truth = spelled_answer(truth)
    expected = _parse(rf"\boxed{{{truth}}}", "any")
    if not expected:
        return Unscorable(f"the ground truth cannot be read as mathematics: {shown(truth)}")
    found: list[Any] = []
    correct = False
    # A response that was cut off may have had more in its last box.
    response = item.response if item.finish_reason == "length" else with_closed_box(item.response)
    for said in dict.fromkeys((after_thoughts(response), response)):
        for text, answer in _readings(said):
            last = _parse(text, "any")
            correct = agree(expected, last, truth, answer)
            found = last or found
            if correct:
                break
        if found:
            break
    components = {"format": float(r"\boxed{" in item.response), "readable": float(bool(found))}
    return Scored(float(correct), components, answer=truth if correct else spelled(found))


def _readings(response: str) -> Iterator[tuple[str, str]]:
    """Texts to read the answer from, each with the content of its last box: several boxes are one answer, or steps."""
    text = spelled_response(response)
    boxed = last_braced_box(text)
    yield text, boxed or ""
    if boxed is not None and text.count(r"\boxed{") > 1:
        yield rf"\boxed{{{boxed}}}", boxed


@cache
def _keep_more_formulas() -> None:
    """Gives the library's cache of formulas more room: reading one takes ten times as long as all else."""
    from math_verify import parser

    read = parser.parse_latex_cached.__wrapped__
    read_once = lru_cache(maxsize=_KEPT_FORMULAS)(read)
    vars(parser)[read.__name__] = lambda latex: (read_once if len(latex) <= _KEPT_LENGTH else read)(latex)


def _parse(text: str, reading: Reading) -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    _keep_more_formulas()
    if reading == "latex":
        anchored = LatexExtractionConfig(
            try_extract_without_anchor=False,
            boxed_match_priority=0,
            normalization_config=NormalizationConfig(units=True),
        )
        return list(parse(text, [anchored], extraction_mode="first_match", parsing_timeout=_NO_TIMEOUT))
    formulas, expressions = LatexExtractionConfig(), ExprExtractionConfig()
    targets = (expressions, formulas) if reading == "expression_first" else (formulas, expressions)
    return list(parse(text, targets, parsing_timeout=_NO_TIMEOUT))
