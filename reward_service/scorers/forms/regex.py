"""A regular expression, in Python's syntax: 1 if it is found in the response.

With a group called `answer`, its text in the last match is compared with the ground truth, white space around it aside.
The pattern is that of the function's name (`regex:PATTERN`), or `extra_info.regex`, or the ground truth itself.

A response of more than `LONGEST` characters does not match. Patterns may backtrack for longer than anyone waits, so
they run in worker processes, which can be killed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.truths import TruthError, TruthScorer, texts, uses_row

LONGEST = 1 << 16
FIELD = "regex"
# The group whose text is the answer.
_GROUP = "answer"
_LONGEST_PATTERN = 4096


class Expected(NamedTuple):
    """A pattern, and the texts that its group `answer` is compared with; none without that group."""

    pattern: re.Pattern[str]
    answers: Sequence[str]


def with_pattern(pattern: str) -> Callable[[RewardItem], Outcome]:
    """The scorer of one pattern for all rows.

    Raises:
        RewardError: it cannot be read.
    """
    try:
        compiled = _compiled(pattern)
    except ValueError as error:
        raise RewardError(f"regex: {error}", hint="write regex:PATTERN in the syntax of Python's re") from error
    return TruthScorer(lambda item: Expected(compiled, _answers(compiled, item.ground_truth)), _judge)


def expected(item: RewardItem) -> Expected:
    """The row's own pattern.

    Raises:
        TruthError: there is none, or none that can be read; or it has a group, and the row nothing to compare it with.
    """
    own = item.extra_info.get(FIELD)
    pattern = item.ground_truth if own is None else own
    if not isinstance(pattern, str) or not pattern:
        raise TruthError(f"the row has no pattern: give extra_info.{FIELD}, or a ground truth that is one")
    try:
        compiled = _compiled(pattern)
    except ValueError as error:
        raise TruthError(str(error)) from error
    return Expected(compiled, _answers(compiled, None if own is None else item.ground_truth))


def _answers(pattern: re.Pattern[str], truth: object) -> Sequence[str]:
    if _GROUP not in pattern.groupindex:
        return ()
    if truth is None:
        raise TruthError(f"the pattern has a group {_GROUP!r}, and the row no ground truth to compare it with")
    return texts(truth)


def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern.

    Raises:
        ValueError: it is too long, or none.
    """
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"a pattern of {len(pattern)} characters, {_LONGEST_PATTERN} are allowed")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} cannot be read: {error}") from error


def _judge(item: RewardItem, truth: Expected) -> Outcome:
    if not truth.answers:
        found = len(item.response) <= LONGEST and truth.pattern.search(item.response) is not None
        return Scored(float(found), {"format": float(found)})
    answer = None
    if len(item.response) <= LONGEST:
        for match in truth.pattern.finditer(item.response):
            answer = match[_GROUP]
    said = (answer or "").strip()
    right = answer is not None and said in truth.answers
    return Scored(float(right), {"format": float(answer is not None)}, answer=truth.answers[0] if right else said)


@uses_row(expected)
def score(item: RewardItem, truth: Expected) -> Outcome:
    """1.0 or 0.0 by the row's own pattern; unscorable where there is none, or none that can be read."""
    return _judge(item, truth)
