"""The steps of a response, and one number of their values. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from rollmesh.reward_service.outcomes import Span

Splitting = Literal["blank_rows", "rows", "numbered", "spans"]
Total = Literal["min", "mean", "last", "product", "none"]
Place = tuple[int, int]
"""First character of a step, and the one after its last."""

_BORDERS: Mapping[str, re.Pattern[str]] = {
    "blank_rows": re.compile(r"\n[^\S\n]*\n"),
    "rows": re.compile(r"\n"),
    # Before the words, which belong to the step.
    "numbered": re.compile(r"^(?=[^\S\n]{0,8}(?:\*\*|#{1,6} )?step \d{1,4}\b)", re.IGNORECASE | re.MULTILINE),
}
_TOTALS: Mapping[Total, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda values: sum(values) / len(values),
    "last": lambda values: values[-1],
    "product": math.prod,
    "none": lambda _: 0.0,
}


def split(response: str, splitting: Splitting, spans: Sequence[Span] = ()) -> list[Place]:
    """The steps of a response, white space around them aside; none of an empty one.

    Args:
        splitting: at blank rows, at each row, before `Step N`, or as `spans` say.
        spans: of the item, in any order: turns or steps. All of the response is one step if there are none.
    """
    if splitting == "spans":
        chosen = [span for span in spans if span.kind in ("", "step", "turn")]
        places = sorted((max(0, span.begin), min(len(response), span.end)) for span in chosen)
        places = places or [(0, len(response))]
    else:
        found = [match.span() for match in _BORDERS[splitting].finditer(response)]
        begins = [0, *(end for _, end in found)]
        places = list(zip(begins, [*(start for start, _ in found), len(response)], strict=True))
    return [step for begin, end in places if (step := _stripped(response, begin, end))]


def total_of(values: Sequence[float], how: Total) -> float:
    """One number of the steps' values; there is at least one."""
    return _TOTALS[how](values)


def _stripped(text: str, begin: int, end: int) -> Place | None:
    piece = text[begin:end]
    left = len(piece) - len(piece.lstrip())
    right = len(piece.rstrip())
    return (begin + left, begin + right) if left < right else None
