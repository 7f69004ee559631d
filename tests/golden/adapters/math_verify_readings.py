"""math-verify as peers call it: the installed version reads and compares as the recorded one did.

The scorer `math` decides more for itself (`scorers/mathematics/equality.py`), so it is not what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from rollmesh.reward_service.scorers.boxes import last_boxed
from rollmesh.reward_service.scorers.mathematics.parsing import NO_TIMEOUT

Reading = Literal["any", "expression_first", "latex", "box"]
# A response may continue for this long after its last box; later text would be read together with it.
_BOX_TAIL = 1000


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a response.

    Attributes:
        readable_truth: whether the ground truth could be read; if not, nothing follows for the response.
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
    expected = _parse(rf"\boxed{{{truth}}}" if boxed_truth else truth, "any")
    start = response.rfind(r"\boxed{")
    if reading == "box":
        tail = response[start:] if start >= 0 else ""
        found = _parse(tail, "any") if last_boxed(tail) and len(tail) <= _BOX_TAIL else []
    else:
        found = _parse(response, reading)
    correct = bool(expected and found) and verify(expected, found, timeout_seconds=NO_TIMEOUT)
    return Grade(bool(expected), start >= 0, bool(found), correct)


def _parse(text: str, reading: Reading) -> list[Any]:
    if reading == "latex":
        anchored = LatexExtractionConfig(
            try_extract_without_anchor=False,
            boxed_match_priority=0,
            normalization_config=NormalizationConfig(units=True),
        )
        return list(parse(text, [anchored], extraction_mode="first_match", parsing_timeout=NO_TIMEOUT))
    formulas, expressions = LatexExtractionConfig(), ExprExtractionConfig()
    targets = (expressions, formulas) if reading == "expression_first" else (formulas, expressions)
    return list(parse(text, targets, parsing_timeout=NO_TIMEOUT))
