"""Values that users' code returns, as text and as numbers.

Invariant: errors of a user's class, where it is shown or converted, leave this module as `ValueError` alone.
"""

from __future__ import annotations

import json
import math
from typing import Any

_SHOWN = 200


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
    return f"{type(error).__name__}: {as_text(error)}"


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
