"""Reading numbers out of text, exactly, in the spellings that people use.

Thousands may be separated by commas (`1,000`, and `1,00,000` as in India), or by spaces where nothing else is written.
Digits of all scripts count, as do the typographic minus, exponents and fractions. A comma anywhere else (`1,5`) means
different numbers in different countries, and is in none here.
"""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

LONGEST = 1000
"""Characters of the longest number: exact arithmetic on more digits takes time."""
_GROUPED = r"\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}"
_EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"
# A minus after a letter, a digit or a bracket is a dash or a subtraction.
NUMBER = re.compile(
    rf"(?:(?<![A-Za-z0-9.)])[-+])?(?:(?:(?:{_GROUPED})(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+){_EXPONENT}", re.ASCII
)
"""A number within a text of plain marks."""
_WHOLE = re.compile(
    rf"([-+]?(?:(?:{_GROUPED}|\d{{1,3}}(?: \d{{3}})+|\d+)(?:\.\d*)?|\.\d+){_EXPONENT})(?: ?/ ?(\d+))?", re.ASCII
)
_CURRENCY = re.compile(r"^([-+]?)\\?[$€£¥] ?")
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_MARKS = str.maketrans(
    {
        **{chr(0xFF00 + place): chr(0x20 + place) for place in range(1, 95)},
        **dict.fromkeys("−﹣", "-"), "٬": ",", "٫": ".", **dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " "),
    }
)  # fmt: skip


def plain_marks(text: str) -> str:
    """A text with ASCII marks, digits and spaces in the places of those of full width and of other scripts.

    It has as many characters as before.
    """
    if text.isascii():
        return text
    return _OTHER_DIGIT.sub(lambda digit: str(int(digit[0])), text.translate(_MARKS))


def parse_number(text: Any) -> Fraction | None:
    """The number that a text or a JSON number is; None if it is not one, or has more than `LONGEST` characters.

    A currency sign before it and a full stop after it do not count.
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    written = str(text).strip()
    if len(written) > LONGEST:
        return None
    written = _CURRENCY.sub(r"\1", plain_marks(written).replace("{,}", ",")).removesuffix(".")
    match = _WHOLE.fullmatch(written)
    if match is None:
        return None
    divisor = int(match[2] or 1)
    return Fraction(Decimal(match[1].replace(",", "").replace(" ", ""))) / divisor if divisor else None
