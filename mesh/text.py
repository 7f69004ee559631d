"""Bounds for texts that other programs send (reasons, errors, names), and pages with generated parts."""

from __future__ import annotations

# Reason why a member of a group is not scored, or a group was dropped: kept with it, and counted under it.
REASON_CHARACTERS = 300
# Reason why a version is not in service, and the transport that brings it: the learner keeps those of all receivers.
REPORT_CHARACTERS = 1000
# Reason why a service waits: each heartbeat carries it.
WAITING_CHARACTERS = 1000


def bounded(text: str, limit: int) -> str:
    """The beginning of a text, in at most `limit` characters, as it can be sent: characters that cannot be encoded are
    replaced.

    Where some is left out, the end says how many characters there were.
    """
    if len(text) > limit:
        mark = f" ... ({len(text)} characters)"
        text = text[: max(0, limit - len(mark))] + mark
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def with_part(page: str, begin: str, end: str, part: str) -> str:
    """A page in which `part` stands between two marks, in place of the former text there."""
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{part}{end}{tail}"
