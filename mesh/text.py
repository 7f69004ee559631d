"""Bounds for texts that other programs send (reasons, errors, names), and pages with generated parts."""

from __future__ import annotations

import re

# Control characters but tabs and line breaks. A terminal takes them for commands, so that a text of another program
# could hide or forge what stands on the screen.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Reason why a member of a group is not scored, or a group was dropped: kept with it, and counted under it.
REASON_CHARACTERS = 300
# Grounds of a reward, kept with its member.
EVIDENCE_CHARACTERS = 8000
# Reason why a version is not in service, and the transport that brings it: the learner keeps those of all receivers.
REPORT_CHARACTERS = 1000
# Reason why a service waits: each heartbeat carries it.
WAITING_CHARACTERS = 1000


def bounded(text: str, limit: int) -> str:
    """The beginning of a text, in at most `limit` characters, as it can be sent and shown (`showable`).

    Where some is left out, the end says how many characters there were.
    """
    if len(text) > limit:
        mark = f" ... ({len(text)} characters)"
        text = text[: max(0, limit - len(mark))] + mark
    return showable(text)


def showable(text: str) -> str:
    """A text in which characters that cannot be encoded, and those that a terminal obeys, are replaced."""
    return text if text.isprintable() else _CONTROL.sub("\ufffd", text.encode("utf-8", "replace").decode())


def is_showable(text: str) -> bool:
    """True for a text without characters that a terminal obeys."""
    return text.isprintable() or _CONTROL.search(text) is None


def with_part(page: str, begin: str, end: str, part: str) -> str:
    """A page in which `part` stands between two marks, in place of the former text there."""
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{part}{end}{tail}"
