"""The program of a response: its last fenced block. Pure, and linear in the response's length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_FENCE = "```"
PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Program:
    """A program as a model has written it."""

    language: str
    source: str


def program_of(response: str, wanted: str | None, name_of: Callable[[str], str | None]) -> Program:
    """The program of a response: its last block in the language, else its last block of all, else the whole response.

    A block that is not closed ends with the response.

    Args:
        response: text.
        wanted: the language of the row; None: that of the block, or Python.
        name_of: from any name of a language to its first; None for what is no language.

    Raises:
        ValueError: the row's language is not known.
    """
    language = None
    if wanted is not None:
        language = name_of(wanted)
        if language is None:
            raise ValueError(f"no language is called {wanted!r}: `rollmesh reward languages` shows their names")
    blocks = [_block(part, name_of) for part in response.split(_FENCE)[1::2]]
    if not blocks:
        return Program(language or PYTHON, response)
    last = next((block for block in reversed(blocks) if language and name_of(block[0]) == language), None)
    if last is None:
        fitting = [block for block in blocks if not block[0] or (language is None and name_of(block[0]))]
        last = (fitting or blocks)[-1]
    label, source = last
    return Program(language or name_of(label) or PYTHON, source)


def _block(text: str, name_of: Callable[[str], str | None]) -> tuple[str, str]:
    """Label and source of a block."""
    head, newline, body = text.partition("\n")
    label = head.strip().strip("{}.").partition(" ")[0]
    if newline:
        return label, body
    # All in one row: ```print(1)```, ```python print(1)```.
    return (label, head.strip().partition(" ")[2]) if name_of(label) else ("", head)
