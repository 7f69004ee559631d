"""The marks between which models write thoughts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
_PARTS = re.compile(f"({'|'.join(re.escape(mark) for marks in THOUGHT_MARKS for mark in marks)})")
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which messages have their thoughts apart from the content."""


def thoughts_end(opened: str) -> str:
    """The mark that closes thoughts; empty for none that are known."""
    return dict(THOUGHT_MARKS).get(opened, "")


def opened_thoughts(text: str) -> str:
    """The mark of thoughts that a text opens and does not close; empty: none."""
    for opening, closing in THOUGHT_MARKS:
        if text.rfind(opening) > text.rfind(closing):
            return opening
    return ""


def after_thoughts(text: str) -> str:
    """The text after the last mark that closes thoughts; all of it where none does."""
    ends = [place + len(closing) for _, closing in THOUGHT_MARKS if (place := text.rfind(closing)) >= 0]
    return text[max(ends) :] if ends else text


def pieces_at_marks(text: str) -> list[str]:
    """A text in pieces, none of them empty: each mark is one, and each text between two."""
    return [piece for piece in _PARTS.split(text) if piece]


def thoughts_at_end(prompt: str) -> str:
    """The mark of thoughts with which a prompt ends; empty: none. The text of its last tokens is enough."""
    return next((opening for opening, _ in THOUGHT_MARKS if prompt.rstrip().endswith(opening)), "")


def thoughts_of(message: Mapping[str, Any]) -> str:
    """The thoughts that a message has apart from its content; empty: none."""
    return next((given for name in THOUGHT_FIELDS if isinstance(given := message.get(name), str) and given.strip()), "")


def thoughts_within(content: Any) -> list[str]:
    """The thoughts that a content begins with, without their marks."""
    text = content if isinstance(content, str) else "".join(map(_text_of, content or ()))
    for opening, closing in THOUGHT_MARKS:
        if text.lstrip().startswith(opening) and closing in text:
            return [text.lstrip()[len(opening) :].partition(closing)[0]]
    return []


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""
