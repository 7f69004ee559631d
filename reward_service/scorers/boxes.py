r"""Finding `\boxed{...}` in a response."""

from __future__ import annotations

_BOX = r"\boxed"


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or what follows a last `\boxed ` up to a `$`; None without one.

    Of nested boxes the innermost counts; one that is not closed is none.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    content = text[start + len(_BOX) :]
    if content.startswith(" "):
        return content[1:].split("$")[0]
    if not content.startswith("{"):
        return None
    depth = 0
    for place, character in enumerate(content):
        depth += (character == "{") - (character == "}")
        if not depth:
            return content[1:place]
    return None
