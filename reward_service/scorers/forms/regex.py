"""A regular expression, in Python's syntax: 1 if it is found in the response.

With a group called `answer`, its text in the last match is compared with the ground truth, white space around it aside.
The pattern is that of the function's name (`regex:PATTERN`), or `extra_info.regex`, or the ground truth itself.

A response of more than `LONGEST` characters does not match. Patterns may backtrack for longer than anyone waits, so
they run in worker processes, which can be killed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers.exact_match import accepted_answers

LONGEST = 1 << 16
FIELD = "regex"
# The group whose text is the answer.
_GROUP = "answer"
_LONGEST_PATTERN = 4096


def with_pattern(pattern: str) -> Callable[[RewardItem], Outcome]:
    """The scorer of one pattern for all rows.

    Raises:
        RewardError: it cannot be read.
    """
    try:
        compiled = _compiled(pattern)
    except ValueError as error:
        raise RewardError(f"regex: {error}", hint="write regex:PATTERN in the syntax of Python's re") from error
    return lambda item: _score(item, compiled, item.ground_truth is not None)


def score(item: RewardItem) -> Outcome:
    """1.0 or 0.0 by the row's own pattern; unscorable where there is none, or none that can be read."""
    own = item.extra_info.get(FIELD)
    pattern = item.ground_truth if own is None else own
    if not isinstance(pattern, str):
        return Unscorable(f"the row has no pattern: give extra_info.{FIELD}, or a ground truth that is one")
    try:
        compiled = _compiled(pattern)
    except ValueError as error:
        return Unscorable(str(error))
    return _score(item, compiled, own is not None and item.ground_truth is not None)


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


def _score(item: RewardItem, pattern: re.Pattern[str], has_truth: bool) -> Outcome:
    captures = _GROUP in pattern.groupindex
    if captures and not has_truth:
        return Unscorable(f"the pattern has a group {_GROUP!r}, and the row no ground truth to compare it with")
    if len(item.response) > LONGEST:
        return Scored(0.0, {"format": 0.0})
    if not captures:
        found = float(pattern.search(item.response) is not None)
        return Scored(found, {"format": found})
    answer = None
    for match in pattern.finditer(item.response):
        answer = match[_GROUP]
    right = answer is not None and answer.strip() in accepted_answers(item)
    return Scored(float(right), {"format": float(answer is not None)})
