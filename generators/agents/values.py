"""What users' code gives back, as text and as numbers, whatever it is.

Invariant: nothing that a user's class does where it is shown or converted comes out of here but as `ValueError`.
"""

from __future__ import annotations

import json
import math
from typing import Any

_SHOWN = 200


def as_text(result: Any) -> str:
    """What a tool returned, as the model sees it: text as it is, all else as JSON where it can be."""
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


def told(error: Exception) -> str:
    """What a user's code raised, as text."""
    return f"{type(error).__name__}: {as_text(error)}"


def as_number(value: Any) -> float:
    """A reward.

    Raises:
        ValueError: it is no finite number; says what it is.
    """
    try:
        number = float(value)
    except Exception as error:
        raise ValueError(f"{as_text(value)[:_SHOWN]} ({type(value).__name__}), not a number") from error
    if not math.isfinite(number):
        raise ValueError(f"{number}, not a finite number")
    return number
