"""Reading the JSON of an answer: strictly, and whatever a model has written."""

from __future__ import annotations

import json
import math
import re
from typing import Any

# A deeper answer is none: what looks at it would exhaust the stack.
DEEPEST = 100
# Digits of an integer: more do not fit into any arithmetic on floats.
_DIGITS = 100
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[ \t]*$", re.MULTILINE)


class NoJsonError(ValueError):
    """A text holds no JSON."""


def answer_text(response: str) -> str:
    """The content of the last fenced block that is closed, of those marked `json` if there are any; else everything."""
    blocks: dict[bool, str] = {}
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(response):
        if opened is None:
            opened = fence
        elif not fence[1]:
            blocks[opened[1].lower() == "json"] = response[opened.end() : fence.start()]
            opened = None
    return blocks.get(True, blocks.get(False, response))


def read(text: str) -> Any:
    """The value that a text is, white space around it aside.

    Raises:
        NoJsonError: it is none, has numbers that are not finite or too long, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=_refused, parse_float=_finite, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise NoJsonError(str(error)) from error
    if _is_deeper(value, DEEPEST):
        raise NoJsonError(f"nested more than {DEEPEST} levels deep")
    return value


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a number that is too large: {text[:40]}")
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _is_deeper(value: Any, most: int) -> bool:
    """True if a value has more than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
