"""String manipulation: 1 if the answer, without white space and one pair of quotes around it, is the ground truth."""

from __future__ import annotations

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers.exact_match import accepted_answers

_QUOTES = "\"'`"


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in _QUOTES:
        return text[1:-1]
    return text


def score(item: RewardItem) -> Outcome:
    """1.0 or 0.0; unscorable without a ground truth."""
    answers = accepted_answers(item)
    if not answers:
        return Unscorable("the row has no ground truth")
    return Scored(float(_unquoted(item.response) in map(_unquoted, answers)))
