"""Grade-school math, compared as text: for numbers that are to agree with published GSM8K runs to the digit.

`gsm8k` compares numbers; here `42.` and `42.0` are not `42`. Only the last 300 characters are looked at. `strict`
requires the answer after `#### `; `flexible` takes the last number of the text.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Literal

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.truths import TruthError, compares_with, one_text, shown

Method = Literal["strict", "flexible"]
_TAIL = 300
_MARK = "####"
_NUMBER = r"-?[0-9.,]+"
_MARKED = re.compile(rf"#### ({_NUMBER})")
_ANY = re.compile(_NUMBER)


def extract(response: str, method: Method) -> str | None:
    """The answer as written, without thousands separators where it was marked; None without an answer."""
    tail = response[-_TAIL:]
    if method == "strict":
        marked = _MARKED.findall(tail)
        return marked[-1].replace(",", "") if marked else None
    return next((number for number in reversed(_ANY.findall(tail)) if number != "."), None)


def grade(response: str, truth: str, *, method: Method = "strict", format_score: float = 0.0) -> float:
    """1 for the right answer, `format_score` for a wrong one, 0 without an answer."""
    answer = extract(response, method)
    if answer is None:
        return 0.0
    return 1.0 if answer == truth else format_score


def text_of(truth: Any, method: Method) -> str:
    """The number that a truth is, as text; that after `####` of a full solution.

    Raises:
        TruthError: it is no text that an answer could equal.
    """
    text = one_text(truth).rpartition(_MARK)[2].strip()
    if not _ANY.fullmatch(text) or text == ".":
        raise TruthError(
            f"the ground truth is not a number as gsm8k_{method} reads it (-?[0-9.,]+): {shown(truth)}; "
            "give its digits, or score by gsm8k"
        )
    # Answers that were marked have no thousands separators, so that a truth with them could not be met.
    return text.replace(",", "") if method == "strict" else text


@compares_with(partial(text_of, method="strict"))
def score_strict(item: RewardItem, truth: str) -> Outcome:
    """1.0 or 0.0 for the answer after `#### `; unscorable where the ground truth is no number."""
    return _score(item, truth, "strict")


@compares_with(partial(text_of, method="flexible"))
def score_flexible(item: RewardItem, truth: str) -> Outcome:
    """1.0 or 0.0 for the last number; unscorable where the ground truth is no number."""
    return _score(item, truth, "flexible")


def _score(item: RewardItem, truth: str, method: Method) -> Outcome:
    answer = extract(item.response, method)
    correct = grade(item.response, truth, method=method)
    return Scored(correct, {"format": float(answer is not None)}, answer=answer or "")
