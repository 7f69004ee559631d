r"""Finding `\boxed{...}` in a response."""

from __future__ import annotations

from typing import Any

from rollmesh.reward_service.scorers.truths import TruthError, one_text, shown

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


def one_answer(truth: Any) -> str:
    """The one answer that a truth is: the content of its last box, or all of it.

    Raises:
        TruthError: it is no text and no number, or there are several.
    """
    text = one_text(truth)
    boxed = last_boxed(text)
    if boxed is not None and not boxed.strip():
        raise TruthError(f"the ground truth has an empty box: {shown(truth)}")
    answer = text if boxed is None else boxed.strip()
    # Dollars around all of it only say that it is a formula.
    inner = answer[1:-1].strip()
    return inner if answer[:1] == answer[-1:] == "$" and inner and "$" not in inner else answer


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
