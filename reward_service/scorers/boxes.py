r"""Finding `\boxed{...}` in a response."""

from __future__ import annotations

_BOX = r"\boxed"


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or the text after a last `\boxed ` up to a `$`; None without one.

    The innermost of nested boxes counts; one that is not closed does not count.
    """
    start = text.rfind(_BOX)
    if start >= 0 and text.startswith(" ", start + len(_BOX)):
        return text[start + len(_BOX) + 1 :].split("$")[0]
    return _content(text, start)


def last_braced_box(text: str) -> str | None:
    r"""The same with braces alone: a `\boxed ` without them is no box."""
    return _content(text, text.rfind(_BOX + "{"))


def _content(text: str, start: int) -> str | None:
    """The text between the braces of the box at a place; None without a place, an opening brace or a closing one."""
    place = start + len(_BOX)
    if start < 0 or not text.startswith("{", place):
        return None
    depth = 0
    for end in range(place, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if not depth:
            return text[place + 1 : end]
    return None
