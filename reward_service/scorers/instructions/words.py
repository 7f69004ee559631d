"""Words, sentences and paragraphs of a text, as instructions count them; in linear time."""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

import re

_WORD = re.compile(r"\w+")
_CAPITAL_WORD = re.compile(r"\w+(?:[-'’]\w+)*")
_SENTENCE_END = re.compile(r"(?<![.!?。！？।])[.!?。！？।]+[\"'”’)\]]{0,3}(?=\s|$)|[。！？]")
# Their full stop ends no sentence, unless the text ends with them.
_ABBREVIATIONS = frozenset(
    {
        *("mr", "mrs", "ms", "dr", "prof", "sr", "jr", "st", "vs", "etc", "inc", "ltd", "co", "no", "fig", "vol"),
        *("e.g", "i.e", "a.m", "p.m", "u.s", "u.k", "p.s", "ph.d", "approx", "dept", "est", "gen", "col", "rev"),
    }
)
_ENUMERATION = re.compile(r"\d{1,3}")


def keeps(count: int, relation: str, limit: int) -> bool:
    """True if a count is `at least` or `less than` a limit.

    Raises:
        ValueError: another relation.
    """
    if relation not in ("at least", "less than"):
        raise ValueError(f"the relation is `at least` or `less than`, not {relation!r}")
    return count >= limit if relation == "at least" else count < limit


def word_count(text: str) -> int:
    """The number of words: runs of letters, digits and underscores, so that `don't` is two."""
    return len(_WORD.findall(text))


def capital_word_count(text: str) -> int:
    """The number of words in capitals alone; a hyphen or an apostrophe does not end a word."""
    return sum(word.isupper() for word in _CAPITAL_WORD.findall(text))


def sentence_count(text: str) -> int:
    """The number of sentences: a full stop, question or exclamation mark before white space ends one.

    That of an abbreviation, an initial or the number of an item does not. The rest at the end counts too.
    """
    count, begin = 0, 0
    for end in _SENTENCE_END.finditer(text):
        before = text[max(begin, end.start() - 20) : end.start()].rpartition(" ")[2].rpartition("\n")[2]
        is_last = not text[end.end() :].strip() if len(text) - end.end() < 100 else False
        if end[0] == "." and not is_last and _ends_no_sentence(before.lstrip("(\"'“‘")):
            continue
        if _has_word(text, begin, end.start()):
            count += 1
        begin = end.end()
    return count + _has_word(text, begin, len(text))


def _has_word(text: str, begin: int, end: int) -> bool:
    return _WORD.search(text, begin, end) is not None


def _ends_no_sentence(word: str) -> bool:
    """True if the full stop after a word belongs to it."""
    initial = len(word) == 1 and word.isupper() and word != "I"
    return initial or word.lower() in _ABBREVIATIONS or _ENUMERATION.fullmatch(word) is not None


def parts_between(text: str, separator: str) -> list[str] | None:
    """The parts between separators, without white space around them; None where one in the middle is empty.

    Empty parts at the beginning and the end do not count.
    """
    parts = [part.strip() for part in text.split(separator)]
    if not all(parts[1:-1]):
        return None
    return [part for part in parts if part]
