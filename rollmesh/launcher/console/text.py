"""Text that fits a terminal, and the numbers in it."""

from __future__ import annotations

import shutil
import textwrap
import time

# Columns of a line where there is no terminal; the variable COLUMNS changes it.
PLAIN_COLUMNS = 100
_CLOCK = "00:00:00 "


def plain_columns() -> int:
    """Columns of plain lines."""
    return shutil.get_terminal_size((PLAIN_COLUMNS, 24)).columns


def clock() -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S")


def fitted(text: str, columns: int) -> str:
    """A text after a clock, in as many lines as it takes; only words that are longer are not cut.

    Args:
        text: of one line.
        columns: of a line, the clock included.
    """
    if len(text) <= columns:
        return text
    indent = " " * len(_CLOCK)
    return "\n".join(
        textwrap.wrap(text, max(columns, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )


def shortened(text: str, columns: int) -> str:
    """The beginning of a text in one line of at most so many columns."""
    line = " ".join(text.split())
    return line if len(line) <= columns else f"{line[: max(0, columns - 3)]}..."


def duration(seconds: float) -> str:
    """A time ahead, rounded as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def compact(number: float) -> str:
    """A count in a few digits: 950, 4120, 12k, 3.4M."""
    if number >= 1e6:
        return f"{number / 1e6:.1f}M"
    return f"{number / 1e3:.0f}k" if number >= 1e4 else f"{number:.0f}"
