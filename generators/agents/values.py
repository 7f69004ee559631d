"""Values that users' code returns, as text and as numbers, and what its errors say.

Invariant: errors of a user's class, where it is shown or converted, leave this module as `ValueError` alone.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import Any

_SHOWN = 200
_TRACEBACK = "Traceback (most recent call last):"
# The beginning of a line in the traceback of a group, and a line between those of its errors.
_GROUP, _BETWEEN = re.compile(r"\s*[|+](?: |$)"), re.compile(r"\s*[+-]+[-+\d\s.]*$")
# Lines before tracebacks, or at the end, that are not what ended a program.
_ASIDE = re.compile(r"Exception ignored in|--- Logging error ---|future: <|Task exception was|Node\.js v")
_NO_WORDS = re.compile(f"{_BETWEEN.pattern}|{_ASIDE.pattern}|.*{re.escape(_TRACEBACK)}$")


def as_text(result: Any) -> str:
    """A tool's result as the model sees it: text as it is, all else as JSON where it can be."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return str(result)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        return f"<{type(result).__name__} that cannot be shown: {type(error).__name__}>"


def describe_error(error: BaseException) -> str:
    """The error of a user's code, as text; of a group its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = as_text(error)
    return f"{type(error).__name__}: {cause_of(text) if _TRACEBACK in text else text}"


def cause_of(printed: str) -> str:
    """The part of a program's last words that says why it ended.

    Args:
        printed: what it printed, or the end of that.

    Returns:
        of a traceback of Python the error, without its frames; else the last line that is not indented; empty where
        nothing was printed.
    """
    lines = [_GROUP.sub("", line).rstrip() for line in printed.strip().splitlines()]
    begins = [
        at for at, line in enumerate(lines) if line.endswith(_TRACEBACK) and not _ASIDE.match(lines[max(0, at - 1)])
    ]
    # Indented lines are frames.
    words = [at for at, line in enumerate(lines) if line and not line[0].isspace() and not _NO_WORDS.match(line)]
    error = next((at for at in words if at > begins[-1]), None) if begins else None
    if error is None:
        return lines[words[-1]] if words else ""
    said = itertools.takewhile(lambda line: not _ASIDE.match(line), lines[error:])
    return "\n".join(line for line in said if line and not _BETWEEN.match(line))


def as_number(value: Any) -> float:
    """A reward.

    Raises:
        ValueError: it is no finite number; says what it is.
    """
    try:
        number = float(value)
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"{as_text(value)[:_SHOWN]} ({type(value).__name__}), not a number") from error
    if not math.isfinite(number):
        raise ValueError(f"{number}, not a finite number")
    return number
