"""The marks between which models write thoughts."""

from __future__ import annotations

THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


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


def thoughts_at_end(prompt: str) -> str:
    """The mark of thoughts with which a prompt ends; empty: none. The text of its last tokens is enough."""
    return next((opening for opening, _ in THOUGHT_MARKS if prompt.rstrip().endswith(opening)), "")
