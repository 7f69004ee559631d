"""The program of a response: its last fenced block. Pure, and linear in the response's length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_FENCE = "```"
PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Program:
    """A program as a model has written it."""

    language: str
    source: str


def program_of(response: str, wanted: str | None, names: Mapping[str, str]) -> Program:
    """The program of a response: its last block in the language, else its last block of all, else the whole response.

    A block that is not closed ends with the response.

    Args:
        response: text.
        wanted: the language of the row; None: that of the block, or Python.
        names: names of languages, in small letters, and the language of each.

    Raises:
        ValueError: the row's language is not among the names.
    """
    language = None
    if wanted is not None:
        language = names.get(wanted.lower())
        if language is None:
            raise ValueError(f"no language is called {wanted!r}; known: {', '.join(sorted(names))}")
    blocks = [_block(part, names) for part in response.split(_FENCE)[1::2]]
    if not blocks:
        return Program(language or PYTHON, response)
    last = next((block for block in reversed(blocks) if language and names.get(block[0]) == language), None)
    if last is None:
        fitting = [block for block in blocks if not block[0] or (language is None and block[0] in names)]
        last = (fitting or blocks)[-1]
    label, source = last
    return Program(language or names.get(label, PYTHON), source)


def _block(text: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Label, in small letters, and source of a block."""
    head, newline, body = text.partition("\n")
    label = head.strip().strip("{}.").partition(" ")[0].lower()
    if newline:
        return label, body
    # All on one line: ```print(1)```, ```python print(1)```.
    return (label, head.strip().partition(" ")[2]) if label in names else ("", head)
