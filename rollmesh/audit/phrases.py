"""Phrases that many texts have in common: found word by word, so that only frequent ones are ever kept."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

Phrase = tuple[str, ...]
BEGIN, END = "^", "$"
"""Words that stand for the ends of a text."""
_WORD = re.compile(r"\w+|[^\w\s]")
# Words at each end of a text that are looked at, and of the longest phrase.
_ENDS, _LONGEST = 200, 5
# Words of the marks that graders look for: a reward asks for them.
_ASKED_FOR = frozenset({"answer", "boxed", "final", "is", "the", "think"})


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a text at its beginning and at its end.

    Attributes:
        parts: words in their order.
        known: words that say nothing: those of the question, and of its answer.
    """

    parts: Sequence[Sequence[str]]
    known: frozenset[str]

    @classmethod
    def of(cls, text: str, known: str) -> Words:
        """From a text, and the one whose words say nothing."""
        words = _words(text)
        ends = ([BEGIN, *words[:_ENDS]], [*words[-_ENDS:], END])
        parts = ends if len(words) > 2 * _ENDS else ([BEGIN, *words, END],)
        return cls(parts, frozenset(_words(known)) | {BEGIN, END} | _ASKED_FOR)

    def phrases(self, length: int) -> Iterator[Phrase]:
        """All phrases of some words."""
        for part in self.parts:
            for start in range(len(part) - length + 1):
                yield tuple(part[start : start + length])

    def own(self, wanted: Collection[Phrase]) -> set[Phrase]:
        """Those of some phrases that this text has, and that say something in it."""
        return {
            phrase
            for length in range(1, _LONGEST + 1)
            for phrase in self.phrases(length)
            if phrase in wanted and any(word not in self.known and word.isalnum() for word in phrase)
        }


def frequent_phrases(texts: Sequence[Words], least: int) -> set[Phrase]:
    """The phrases of one to five words that at least so many texts have."""
    found: set[Phrase] = set()
    shorter: set[Phrase] = set()
    for length in range(1, _LONGEST + 1):
        counts = Counter(
            phrase
            for text in texts
            for phrase in set(text.phrases(length))
            if length == 1 or (phrase[:-1] in shorter and phrase[1:] in shorter)
        )
        shorter = {phrase for phrase, count in counts.items() if count >= least}
        found |= shorter
    return found


def _words(text: str) -> list[str]:
    # One object for each word, however often it comes.
    return [sys.intern(word) for word in _WORD.findall(text.lower())]
