"""Comparison of outputs and results with those that were expected. Pure."""

from __future__ import annotations

import math
import re
from typing import Any

# Relative or absolute difference of numbers that are no integers.
TOLERANCE = 1e-6
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")
_INTEGER = re.compile(r"[+-]?\d+")
_LONGEST_NUMBER = 64


def same_text(found: str, expected: str) -> bool:
    """True for the same words in the same rows.

    Spaces around and between words do not count, nor do empty rows. A word is the same if it is equal, or if both are
    numbers of equal value. Where the expected one is no integer, they may differ by `TOLERANCE`.
    """
    if found == expected:
        return True
    rows, wanted = _rows(found), _rows(expected)
    return len(rows) == len(wanted) and all(
        row == other or (len(row) == len(other) and all(map(_same_word, row, other)))
        for row, other in zip(rows, wanted, strict=True)
    )


def _rows(text: str) -> list[list[str]]:
    return [words for row in text.split("\n") if (words := row.split())]


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if max(len(found), len(expected)) > _LONGEST_NUMBER:
        return False
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(found) and _INTEGER.fullmatch(expected):
        return int(found) == int(expected)
    value, wanted = float(found), float(expected)
    return value == wanted if _INTEGER.fullmatch(expected) else _close(value, wanted)


def _close(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(found: Any, expected: Any) -> bool:
    """True for equal JSON values; numbers with a fraction within `TOLERANCE`, names of objects as texts."""
    try:
        return _same_value(found, expected)
    except RecursionError:
        return False


def _same_value(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_same_value, found, expected))
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return False
        return all(_same_value(found[name], value) for name, value in expected.items())
    if isinstance(expected, float) and isinstance(found, int | float) and not isinstance(found, bool):
        return bool(found == expected) or _close_to(found, expected)
    if isinstance(found, float) and isinstance(expected, int):
        return bool(found == expected)
    return bool(found == expected) and not isinstance(found, list | dict)


def _close_to(found: float, expected: float) -> bool:
    try:
        return _close(float(found), expected)
    except OverflowError:
        return False
