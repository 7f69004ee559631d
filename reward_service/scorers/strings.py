"""String manipulation: 1 if the answer, without white space and one pair of quotes around it, is the ground truth."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.truths import compares_with, texts

_QUOTES = "\"'`"


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in _QUOTES:
        return text[1:-1]
    return text


@compares_with(texts)
def score(item: RewardItem, truths: Sequence[str]) -> Outcome:
    """1.0 or 0.0; unscorable without a text or a number, or a list of them."""
    accepted, answer = [_unquoted(truth) for truth in truths], _unquoted(item.response)
    right = answer in accepted
    return Scored(float(right), answer=accepted[0] if right else answer)
