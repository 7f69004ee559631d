"""Reading numbers out of text, exactly."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")


def parse_number(text: Any) -> Decimal | None:
    """The number that `text` (a string or a JSON number) is, thousands separators allowed; None if it is not one."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    stripped = str(text).strip().replace(",", "").removeprefix("$").removesuffix(".")
    try:
        value = Decimal(stripped)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
