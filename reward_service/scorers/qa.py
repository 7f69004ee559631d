"""Open questions: the last `<answer>...</answer>`, compared as words.

SQuAD's normalization (Rajpurkar et al., arXiv:1606.05250): lower case, no punctuation, no articles, single spaces.
`exact` requires an accepted answer itself, `contains` a text that includes one; F1 counts the words they share.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.truths import TruthError, alternatives, compares_with, fields_of, shown

_OPEN, _CLOSE = "<answer>", "</answer>"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Answering so often is guessing: the reward is divided.
_MANY_TAGS, _MANY_TAGS_DIVISOR = 10, 4.0
# Answers of which a part is not half right.
_WHOLE = frozenset({"yes", "no", "noanswer"})


class Overlap(NamedTuple):
    """Shared words of two answers."""

    f1: float
    precision: float
    recall: float


def extract(response: str) -> str | None:
    """The last answer, without white space around it; None without one.

    Tags are paired from the left, each opening one with the next closing one.
    """
    answer = None
    end = 0
    # Not by a regular expression: over tags that are never closed, it would read the rest of the text for each.
    while (start := response.find(_OPEN, end)) >= 0 and (close := response.find(_CLOSE, start)) >= 0:
        answer = response[start + len(_OPEN) : close]
        end = close + len(_CLOSE)
    return None if answer is None else answer.strip()


def normalize(text: str) -> str:
    """Words without case, punctuation and articles."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def grade(
    response: str, truths: Sequence[str], *, match: Literal["exact", "contains"] = "exact", format_score: float = 0.0
) -> float:
    """1 for a right answer (a quarter of it for more than ten tags), `format_score` for a wrong one, 0 for none."""
    answer = extract(response)
    if answer is None:
        return 0.0
    given, expected = normalize(answer), [normalize(truth) for truth in truths]
    if match == "contains":
        return 1.0 if any(truth in given for truth in expected) else format_score
    if given not in expected:
        return format_score
    many = max(response.count(_OPEN), response.count(_CLOSE)) > _MANY_TAGS
    return 1.0 / _MANY_TAGS_DIVISOR if many else 1.0


def overlap(answer: str | None, truth: str) -> Overlap:
    """F1, precision and recall over words; all 0 without an answer."""
    given, expected = normalize(answer or ""), normalize(truth)
    shared = sum((Counter(given.split()) & Counter(expected.split())).values())
    if not shared or (given != expected and not _WHOLE.isdisjoint((given, expected))):
        return Overlap(0.0, 0.0, 0.0)
    precision, recall = shared / len(given.split()), shared / len(expected.split())
    return Overlap(2 * precision * recall / (precision + recall), precision, recall)


def accepted(truth: Any) -> list[str]:
    """The accepted answers: a text, a number, a list of these, or Search-R1's `{"target": ...}` with one of them.

    Raises:
        TruthError: it has none, or none with a word that is compared.
    """
    fields = fields_of(truth)
    if fields is not None and "target" not in fields:
        raise TruthError(f"the ground truth is an object without target: {shown(truth)}; give a text, or a list")
    found = alternatives(truth if fields is None else fields["target"])
    # An empty answer would equal those that are articles and punctuation alone.
    compared = [text for text in found if normalize(text)]
    if not compared:
        raise TruthError(f"the ground truth has no word that qa compares: {shown(truth)}; exact_match compares all")
    return compared


@compares_with(accepted)
def score(item: RewardItem, truths: Sequence[str]) -> Outcome:
    """1.0 or 0.0 by exact match, with the components `format` and `f1`; unscorable without an accepted answer."""
    answer = extract(item.response)
    best = max(overlap(answer, truth).f1 for truth in truths)
    total = grade(item.response, truths)
    read = normalize(truths[0] if total > 0 else answer or "")
    return Scored(total, {"format": float(answer is not None), "f1": best}, answer=read)
