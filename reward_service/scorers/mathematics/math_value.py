r"""Mathematics, compared by value: math-verify reads both answers (LaTeX or plain), sympy decides whether they agree.

Fractions, decimals, intervals, sets, equations and symbolic expressions are understood. There are expressions that no
computer has the time to evaluate: the deadline of the call ends them, with the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollmesh.mesh.chat.thoughts import after_thoughts
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers.boxes import last_braced_box, one_answer
from rollmesh.reward_service.scorers.mathematics.equality import agree, value_text
from rollmesh.reward_service.scorers.mathematics.parsing import parse
from rollmesh.reward_service.scorers.mathematics.spelling import spelled_answer, spelled_response, with_closed_box
from rollmesh.reward_service.scorers.truths import compares_with, shown


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a response.

    Attributes:
        correct: its answer agrees with the truth.
        readable: an answer was found in it and could be read.
        answer: a text that is the same for answers of one value; empty where none could be read.
    """

    correct: bool
    readable: bool
    answer: str


def grade(response: str, truth: str, *, was_cut_off: bool = False) -> Grade | None:
    """Compares a response with the truth.

    Args:
        response: the text.
        truth: the answer, in LaTeX or plain.
        was_cut_off: the response may have had more in a last box that it does not close.

    Returns:
        The grade; None if the truth cannot be read.
    """
    truth = spelled_answer(truth)
    expected = parse(rf"\boxed{{{truth}}}")
    if not expected:
        return None
    found: list[Any] = []
    response = response if was_cut_off else with_closed_box(response)
    for part in dict.fromkeys((after_thoughts(response), response)):
        for text, answer in _readings(part):
            last = parse(text)
            found = last or found
            if agree(expected, last, truth, answer):
                return Grade(correct=True, readable=True, answer=truth)
        if found:
            break
    return Grade(correct=False, readable=bool(found), answer=value_text(found))


@compares_with(one_answer)
def score(item: RewardItem, truth: str) -> Outcome:
    """1.0 or 0.0; unscorable without a ground truth that can be read."""
    result = grade(item.response, truth, was_cut_off=item.finish_reason == "length")
    if result is None:
        return Unscorable(f"the ground truth cannot be read as mathematics: {shown(truth)}")
    components = {"format": float(r"\boxed{" in item.response), "readable": float(result.readable)}
    return Scored(float(result.correct), components, answer=result.answer)


def _readings(response: str) -> Iterator[tuple[str, str]]:
    """Texts to read the answer from, each with the content of its last box: several boxes are one answer, or steps."""
    text = spelled_response(response)
    boxed = last_braced_box(text)
    yield text, boxed or ""
    if boxed is not None and text.count(r"\boxed{") > 1:
        yield rf"\boxed{{{boxed}}}", boxed
