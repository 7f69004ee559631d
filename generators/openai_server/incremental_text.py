"""The text of an answer while its tokens come.

Invariants: the pieces, concatenated, are the beginning of the text that `whole_text` gives of all tokens. A piece never
ends within a character, and never holds what may turn out to be the beginning of a stop string. All pieces together
cost a few times what their tokens do, also where these are no characters for long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Tokens of one character, about.
_PATIENCE = 8


def whole_text(text: str, stops: Sequence[str]) -> str:
    """A finished answer's text: the part before the first stop string."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class IncrementalDetokenizer:
    """The text of one answer.

    Args:
        decode: tokens to text; the text of some tokens begins that of more, but for the last character.
        stops: strings that end the answer and do not belong to it.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        # Only the last tokens are decoded again: what is before `_done` is text already.
        self._context = 0
        self._done = 0
        self._next = 0
        self._held_back = ""
        self._stopped = False

    @property
    def pending(self) -> int:
        """Tokens that are decoded again with the next ones."""
        return len(self._ids) - self._context

    def add(self, ids: Sequence[int]) -> str:
        """The text that new tokens add, as far as it is certain."""
        self._ids.extend(ids)
        if self._stopped or len(self._ids) < self._next:
            return ""
        before = self._decode(self._ids[self._context : self._done])
        now = self._decode(self._ids[self._context :])
        if now.endswith(_BROKEN) or len(now) <= len(before):
            # Tried again with each token at first, then ever more seldom.
            self._next = len(self._ids) + 1 + (len(self._ids) - self._done) // _PATIENCE
            return ""
        self._context, self._done = self._done, len(self._ids)
        text = self._held_back + now[len(before) :]
        kept = whole_text(text, self._stops)
        self._stopped = len(kept) < len(text)
        if self._stopped:
            self._held_back = ""
            return kept
        hold = _beginning_of(text, self._stops)
        self._held_back = text[len(text) - hold :]
        return text[: len(text) - hold]


def _beginning_of(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may begin a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for count in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-count:]) for stop in stops):
            return count
    return 0
