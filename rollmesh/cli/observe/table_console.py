"""Printing of tables on the terminal, and to programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Characters: wider than any line of the tables, since piped output is for programs and for grep.
_PIPED_WIDTH = 320


def table_console() -> Console:
    """A console that prints text as it is, and cuts no line where its output is piped."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)
