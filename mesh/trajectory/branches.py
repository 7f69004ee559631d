"""Branches: turns of an agent's session that are in no trajectory, and the reasons for them in words.

A trajectory is one chain of turns. A call that continues an earlier turn than the last one, or none, begins a branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

MANY = 0.05
"""The share of turns in branches from which a user is warned."""
DROPPED = "turns_dropped"
"""The metric of an episode: turns in branches. Those by cause are `turns_dropped_CAUSE`."""


class Cause(StrEnum):
    """The reason why a call does not continue the answers that were given before."""

    REWRITTEN = "rewritten"
    """An answer has come back with another meaning."""
    HISTORY = "history"
    """Other messages than answers have changed, or are gone."""
    REPEATED = "repeated"
    """The same is asked once more."""
    ANOTHER = "another"
    """A conversation of its own, or one at the same time."""
    TOOLS = "tools"
    """The first tools of a conversation come in a later call: its prompt shows none."""
    TEMPLATE = "template"
    """The chat template cannot continue after an answer."""
    CHOICES = "choices"
    """A call asks for several answers."""

    @property
    def text(self) -> str:
        """The reason in words."""
        return _TEXTS[self]

    @property
    def metric(self) -> str:
        """The metric of an episode: its turns in branches that have this cause."""
        return f"{DROPPED}_{self}"


_TEXTS = {
    Cause.REWRITTEN: "the client rewrites assistant messages",
    Cause.HISTORY: "the client rewrites or drops earlier messages",
    Cause.REPEATED: "the client asks the same again",
    Cause.ANOTHER: "the client has several conversations",
    Cause.TOOLS: "the client offers the first tools after the first answer",
    Cause.TEMPLATE: "the chat template cannot continue after an answer",
    Cause.CHOICES: "the client asks for several answers at once",
}


def branches_text(turns: float, causes: Mapping[Cause, float]) -> str:
    """The share of turns in branches and the most frequent reason; empty without any.

    Args:
        turns: in trajectories.
        causes: turns in branches by cause.
    """
    dropped = sum(causes.values())
    if not dropped:
        return ""
    cause = max(causes, key=lambda found: causes[found])
    others = sum(value > 0 for value in causes.values()) - 1
    also = f" (and {others} other reason{'s' if others > 1 else ''})" if others else ""
    share = 100 * dropped / (turns + dropped)
    return (
        f"{share:.0f} % of turns are branches, which are not trained: {cause.text}{also}; see docs/endpoint.md#branches"
    )
