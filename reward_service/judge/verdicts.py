"""Verdicts: the JSON schema that is asked of the judge, and how an answer is read.

Invariant: a verdict that cannot be read, or lies off the scale, is an error and never clipped into a score.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollmesh.mesh.chat.thoughts import after_thoughts
from rollmesh.mesh.text import bounded
from rollmesh.reward_service.judge.errors import AnswerError

# Characters of an answer that are looked at, and of a reason that are kept.
_LONGEST = 256 << 10
_REASON = 2000
_WINS = {"first": 1.0, "tie": 0.5, "second": 0.0}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A value with the judge's reason for it."""

    value: float
    reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """The kind of verdict that is wanted.

    Attributes:
        schema: of the answer.
        value: from the answer's object.
    """

    schema: Mapping[str, Any]
    value: Callable[[Mapping[str, Any]], float]

    def read(self, answer: str) -> Verdict:
        """The verdict in an answer.

        Raises:
            AnswerError: there is none.
        """
        found = _fields(answer)
        reason = found.get("reason", "")
        if not isinstance(reason, str):
            raise AnswerError(f"`reason` is {_kind(reason)}, and has to be a text")
        return Verdict(self.value(found), bounded(reason, _REASON))


def score_on(scale: tuple[float, float]) -> Question:
    """A number on a scale, both ends included."""
    low, high = scale

    def value(found: Mapping[str, Any]) -> float:
        score = found.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise AnswerError(f"`score` is {_kind(score)}, and has to be a number")
        # False for what is not a number, too.
        if not low <= score <= high:
            raise AnswerError(f"`score` is off the scale from {low:g} to {high:g}")
        return float(score)

    return Question(_schema({"score": {"type": "number", "minimum": low, "maximum": high}}), value)


def winner() -> Question:
    """The better of two: 1 for the first, 0 for the second, a half for neither."""

    def value(found: Mapping[str, Any]) -> float:
        won = found.get("winner")
        if not isinstance(won, str) or won not in _WINS:
            raise AnswerError(f"`winner` has to be one of {', '.join(_WINS)}")
        return _WINS[won]

    return Question(_schema({"winner": {"type": "string", "enum": list(_WINS)}}), value)


def combined(votes: Sequence[float], how: Literal["mean", "median"]) -> float:
    """Votes reduced to one value."""
    return statistics.fmean(votes) if how == "mean" else statistics.median(votes)


def _schema(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    # The reason comes first: a model thinks while it writes.
    properties = {"reason": {"type": "string"}, **fields}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _fields(answer: str) -> Mapping[str, Any]:
    """The JSON object in an answer, also in a fenced block or after thoughts."""
    if len(answer) > _LONGEST:
        raise AnswerError(f"{len(answer)} characters, {_LONGEST} are read")
    text = after_thoughts(answer)
    begin, end = text.find("{"), text.rfind("}")
    if begin < 0 or end < begin:
        raise AnswerError("no JSON object in the answer")
    try:
        found = json.loads(text[begin : end + 1], parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"the answer's object is not JSON: {bounded(str(error), 100)}") from error
    # It begins with a brace.
    result: Mapping[str, Any] = found
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _kind(value: object) -> str:
    return "missing" if value is None else type(value).__name__
