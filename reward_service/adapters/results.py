"""Outcomes from what users' functions return: numbers, None, dicts with a score, and lists of these."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored, SpanValue, Unscorable

log = logging.getLogger(__name__)
# The answer in verl's dicts, and the text that stands there for none.
_PRED, _INVALID = "pred", "[INVALID]"


class OutputError(RewardError):
    """A reward function returned something that is no reward."""

    code = "bad_output"


def failure(name: str, error: BaseException) -> Failed:
    """The outcome of an exception that `name` raised."""
    if isinstance(error, PayloadError):
        return Failed("bad_input", f"{name}: {error}")
    if isinstance(error, OutputError):
        return Failed("bad_output", f"{name}: {error}")
    log.debug("reward function %s raised", name, exc_info=error)
    # A failed connection or file access may pass; a bug in the function does not.
    transient = isinstance(error, OSError)
    return Failed("exception", f"{name} raised {type(error).__name__}: {error}", retryable=transient)


def number(value: Any) -> float:
    """A float from a number, a bool, or an array or tensor of one element.

    Raises:
        OutputError: for anything else.
    """
    if isinstance(value, str | bytes):
        raise OutputError(f"returned {value!r}, expected a number")
    try:
        return float(_element(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise OutputError(f"returned {type(value).__name__}, expected a number") from error
    except OverflowError as error:
        raise OutputError(f"returned a number that is too large: {error}") from error


def number_or_none(value: Any) -> float | None:
    """The same; None for a value that is no number, such as a text or a list."""
    try:
        plain = _element(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number(plain) if isinstance(plain, int | float | Decimal | Fraction) else None


def _element(value: Any) -> Any:
    """The number in a NumPy number, or in an array or tensor of one element; any other value as it is."""
    return value.item() if hasattr(value, "dtype") and callable(getattr(value, "item", None)) else value


def read_score(value: Any) -> Outcome:
    """The outcome of a number, of None, or of a dict with `score`, which may be None.

    Other numbers of the dict are components; `spans` in it are rewards of parts of the response. As in verl, its `pred`
    is the answer that the function has read.
    """
    if not isinstance(value, Mapping):
        return read_entry(value)
    if "score" not in value:
        raise OutputError(f"returned a dict without 'score': {sorted(map(str, value))}")
    if value["score"] is None:
        return Unscorable("the function returned a score of None")
    components = numbers_of(value, leaving_out="score")
    return Scored(
        number(value["score"]),
        components,
        spans=_spans(value.get("spans")),
        answer=_answer(value) if _PRED in value else None,
    )


def _answer(value: Mapping[Any, Any]) -> str:
    """The answer in a dict; empty where the function has found none."""
    found = value[_PRED]
    return "" if found is None or found == _INVALID else str(found)


def _spans(value: Any) -> Sequence[SpanValue]:
    """Rewards of parts: a list of (begin, end, value), in characters of the response, or of `SpanValue`.

    Raises:
        OutputError: for anything else.
    """
    try:
        return tuple(SpanValue.of(span) for span in value or ())
    except (TypeError, ValueError, OverflowError) as error:
        raise OutputError(f"returned spans that are no list of (begin, end, value): {error}") from error


def numbers_of(values: Mapping[Any, Any], *, leaving_out: str = "") -> dict[str, float]:
    """The numbers among the values of a dict; `leaving_out`: a key that does not count."""
    found = {str(key): number_or_none(value) for key, value in values.items() if key != leaving_out}
    return {key: value for key, value in found.items() if value is not None}


def read_entry(value: Any) -> Outcome:
    """The outcome of one entry of a list."""
    if isinstance(value, Scored | Unscorable | Failed):
        return value
    if value is None:
        return Unscorable("the function returned None")
    return Scored(number(value))


def read_batch(items: Sequence[RewardItem], values: Any) -> list[Outcome]:
    """The outcomes of a list with one entry per item."""
    return [read_entry(value) for value in as_list(values, len(items))]


def read_scores(items: Sequence[RewardItem], values: Any) -> list[Outcome]:
    """The same where entries may be dicts with `score`."""
    return [read_score(value) for value in as_list(values, len(items))]


def as_list(values: Any, size: int) -> list[Any]:
    """A list, array or tensor of a size as a list.

    Raises:
        OutputError: it is none, or of another size.
    """
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise OutputError(f"returned {type(values).__name__}, expected one reward per item")
    if len(values) != size:
        raise OutputError(f"returned {len(values)} rewards for {size} items")
    return list(values)
