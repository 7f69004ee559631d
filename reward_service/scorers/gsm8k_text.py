"""Grade-school math, compared as text: for numbers that are to agree with published GSM8K runs to the digit.

`gsm8k` compares numbers; here `42.` and `42.0` are not `42`. Only the last 300 characters are looked at. `strict`
requires the answer after `#### `; `flexible` takes the last number of the text.
"""

from __future__ import annotations

import re
from typing import Literal

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable

Method = Literal["strict", "flexible"]
_TAIL = 300
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


def score_strict(item: RewardItem) -> Outcome:
    """1.0 or 0.0 for the answer after `#### `; unscorable without a ground truth."""
    return _score(item, "strict")


def score_flexible(item: RewardItem) -> Outcome:
    """1.0 or 0.0 for the last number; unscorable without a ground truth."""
    return _score(item, "flexible")


def _score(item: RewardItem, method: Method) -> Outcome:
    if item.ground_truth is None:
        return Unscorable("the row has no ground truth")
    truth = str(item.ground_truth).strip()
    return Scored(
        grade(item.response, truth, method=method), {"format": float(extract(item.response, method) is not None)}
    )
