r"""Multiple choice: 1 if the answer names the right one, by its label or by its text.

The choices are `extra_info.choices` (or `options`). They are a list of texts with the labels A, B, C and so on, an
object from label to text, or ARC's `{"label": [...], "text": [...]}`. Without them any label from A to Z is an answer.
The ground truth is a label, a text, or the place of a choice, counted from 0, where no label is written like it.

The answer is looked for in this order, and what comes last in the response counts:
  1. `\boxed{B}`
  2. `<answer>B</answer>`
  3. `#### B`, `Answer: B`, `the answer is (B)`, `the correct option is **B**`, `I choose B`, `B is correct`, and the
     same in other languages (`announcements`)
  4. a line that is no more than an answer, `B`, `(B)`, `So B.` or `B. Paris`: the last line, else the first

A place that names two choices ends the search: it names none. A box or tag that names none of the choices leaves it to
the other places; an empty one, to those after it. Thoughts count where nothing follows them. Only the last 4,000
characters are read, and the first line.
"""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from rollmesh.mesh.chat.thoughts import after_thoughts
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers import qa
from rollmesh.reward_service.scorers.announcements import announced
from rollmesh.reward_service.scorers.boxes import last_braced_box
from rollmesh.reward_service.scorers.numbers import plain_marks
from rollmesh.reward_service.scorers.truths import TruthError, shown, uses_row

FIELDS = ("choices", "options")
_TAIL = 4000
# Characters of a line that may be no more than an answer.
_LINE = 400
_SEVERAL = "several"
"""Stands for the label of a place that names more than one."""
_NOUNS = r"opción|opção|opzione|alternativa|letra|lettre|lettera|buchstabe|вариант"
_FILLER_WORDS = (
    r"(?:is|the|option|choice|answer|letter|therefore|thus|hence|so|clearly|my|final|correct|best|would be|must be"
    r"|(?:it|that|this)(?:'s|’s| is| must be)|i (?:think|believe|guess|say)(?: that)?"
    rf"|{_NOUNS}|(?:el|la|los|o|a|il|die|der|das)(?=[ \t]+(?:{_NOUNS}|[\[(]?(?-i:[A-Z])\b)))\b"
    r"|因此|所以|故|应|选项|選項|选|選|答案|是|为|項|项"
)
_FILLER = re.compile(rf"(?:(?:{_FILLER_WORDS})[ \t:,]{{0,4}}){{1,6}}", re.IGNORECASE)
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathsf|textsf)\{([^{}]*)\}")
_INLINE = re.compile(r"\\[()\[\]]")
# A letter of any script, a Roman numeral, or a number of two digits. More may follow where words are not spaced.
_LETTER = r"(?:[ivx]{2,4}|[^\W\d_]|\d{1,2})(?![0-9a-zà-ɏ\u0400-\u04ff_'’])"
_OPEN, _CLOSE = r"[\[({<]", r"[\])}>]"
_LABEL = re.compile(rf"({_OPEN}?)({_LETTER})({_CLOSE}?)", re.IGNORECASE)
_ALTERNATIVE = re.compile(
    rf"[ \t]*(?:[,、/|&]|\b(?:and|or|und|oder|et|ou|y|o|e|и|или)\b|[和或与])[ \t]*{_OPEN}?({_LETTER}){_CLOSE}?",
    re.IGNORECASE,
)
# `not A, it is C`
_DENIED = re.compile(
    rf"(?:is )?(?:not|isn't|isn’t) {_OPEN}?{_LETTER}{_CLOSE}?[ \t]*(?:,|;|but|\.)[ \t]*"
    r"(?:but|rather|it is|it's|it’s)?[ \t]*",
    re.IGNORECASE,
)
# `C is correct`, but not `neither B nor C is correct`.
_CORRECT = re.compile(
    r"(?=[\[({<]?[A-Z]|[oca][a-z]{4,5} )(?<![^\W_])(?<!and )(?<!or )(?<!nor )(?<!if )(?<!If )(?<![A-Z], )(?<!whether )"
    r"(?:[\[({<]?([A-Z])[\])}>]?|(?:[Oo]ption|[Cc]hoice|[Aa]nswer) \(?(\d{1,2})\)?)[*_]{0,2}[ \t]{0,4}"
    r"(?:(?:is|must be|has to be)[ \t]+(?:(?:clearly|therefore|indeed|the)[ \t]+){0,2}(?:correct|right|best|true)\b"
    r"|(?:es|est|è|é)[ \t]+(?:(?:la|le|il|a|o|opción|réponse|respuesta|bonne|risposta|resposta)[ \t]+){0,2}"
    r"(?:correct|corrett|corret|bonne)|ist[ \t]+(?:die[ \t]+)?(?:richtig|korrekt)"
    r"|(?:选项|選項)?是?(?:正确|正確)|が正解|[가이] 정답)"
)
_SEPARATORS = frozenset(".:),;-–—。、，：；")
_REASONS = r"[ \t]*(?:because|since|as|due|based|given|not|porque|parce|car|weil|denn|perché|pois|потому)\b"
_REASON = re.compile(_REASONS, re.IGNORECASE)
_REASONED = re.compile(rf"([^\n,;]{{1,200}}?)[,;]?[ \t]{_REASONS}", re.IGNORECASE)
# Another label that is written like one.
_NEXT = re.compile(rf"[ \t.,;:)]*(?:[\[(]({_LETTER})[\])]|({_LETTER})(?=[.):,]|[ \t]*$))", re.IGNORECASE)
_MARKS = ((r"\boxed{", last_braced_box), ("<answer>", qa.extract))
_MARKUP = str.maketrans("", "", "*_$`~")
_EDGES = string.whitespace + ".,;:!?\"'“”‘’。，；：！？、"


def choices_of(item: RewardItem) -> dict[str, str]:
    """Label -> text, in the order of the row; texts are empty where the row has only a label.

    Raises:
        ValueError: the field is there, and holds no choices.
    """
    given: Any = next((item.extra_info[name] for name in FIELDS if item.extra_info.get(name) is not None), None)
    if given is None:
        return dict.fromkeys(string.ascii_uppercase, "")
    if isinstance(given, Mapping) and isinstance(given.get("label"), list) and isinstance(given.get("text"), list):
        labels, texts = given["label"], given["text"]
    elif isinstance(given, Mapping):
        # A table has a column for every label: null where the row has fewer choices.
        own = {label: text for label, text in given.items() if text is not None}
        labels, texts = list(own), list(own.values())
    elif isinstance(given, list):
        labels, texts = list(string.ascii_uppercase[: len(given)]), given
    else:
        raise ValueError(f"expected a list or an object, got {type(given).__name__}")
    found = {str(label).strip().upper(): str(text) for label, text in zip(labels, texts, strict=False)}
    if not found or len(labels) != len(texts) or len(found) != len(labels):
        raise ValueError(f"{len(labels)} labels for {len(texts)} texts, {len(found)} of them different")
    return found


def right_label(truth: Any, choices: Mapping[str, str]) -> str | None:
    """The label that a ground truth means; None where it means none of the choices."""
    if isinstance(truth, list) and len(truth) == 1:
        truth = truth[0]
    # A table writes whole numbers as floats where another row has none.
    truth = int(truth) if isinstance(truth, float) and truth.is_integer() else truth
    if isinstance(truth, bool) or not isinstance(truth, str | int):
        return None
    written = str(truth).strip()
    label = written.strip("()[]. ").upper()
    if label in choices:
        return label
    if not isinstance(truth, int) and (same := _by_text(written, choices)) is not None:
        return same
    if written.isdecimal() and len(written) < 4 and int(written) < len(choices):
        return list(choices)[int(written)]
    # `B. Paris`
    named = _named(written, choices, announced=False)
    return None if named == _SEVERAL else named


def chosen_label(response: str, choices: Mapping[str, str]) -> str | None:
    """The label that a response names, as the module says; None where it names none, or several at once."""
    found = _found(after_thoughts(response), choices)
    if found is None:
        found = _found(response, choices)
    return None if found == _SEVERAL else found


def truth_of(item: RewardItem) -> tuple[str, dict[str, str]]:
    """The right label of a row, and its choices.

    Raises:
        TruthError: it has none.
    """
    try:
        choices = choices_of(item)
    except ValueError as error:
        raise TruthError(f"extra_info.choices: {error}") from error
    label = right_label(item.ground_truth, choices)
    if label is None:
        given = shown(item.ground_truth)
        raise TruthError(
            f"the ground truth is none of the choices {', '.join(choices)}: {given}; give a label or a text"
        )
    return label, choices


@uses_row(truth_of)
def score(item: RewardItem, truth: tuple[str, dict[str, str]]) -> Outcome:
    """1.0 or 0.0, with the component `format` (an answer was found); unscorable without a usable ground truth."""
    label, choices = truth
    chosen = chosen_label(item.response, choices)
    return Scored(float(chosen == label), {"format": float(chosen is not None)}, answer=chosen or "")


def _found(response: str, choices: Mapping[str, str]) -> str | None:
    for place, is_announced in _places(response):
        if (label := _named(place, choices, announced=is_announced)) is not None:
            return label
    return None


def _places(response: str) -> Iterator[tuple[str, bool]]:
    """Texts that may be the answer, those that say so most clearly first, and whether they say so at all."""
    tail = plain_marks(response[-_TAIL:])
    begin = 0
    for mark, content in _MARKS:
        text = tail
        while (found := content(text)) is not None and not found.strip():
            begin = max(begin, text.rfind(mark))
            text = text[: text.rfind(mark)]
        if found is not None:
            begin = 0
            yield found, True
    said = tail[begin:]
    places = [*announced(said), *((match.start(), match[1] or match[2]) for match in _CORRECT.finditer(said))]
    yield from ((text, True) for _, text in sorted(places, reverse=True))
    if begin:
        return
    lines = tail.rstrip().rsplit("\n", 1)
    first = plain_marks(response.lstrip()[: _LINE + 1]).split("\n", 1)[0]
    yield from ((line, False) for line in (lines[-1], first) if len(line) <= _LINE)


def _named(place: str, choices: Mapping[str, str], *, announced: bool) -> str | None:
    """The one choice that a text names, or `_SEVERAL`; where nothing announces it, it is no more than the answer."""
    text = _LATEX_TEXT.sub(r"\1", _INLINE.sub("", place)).translate(_MARKUP).strip(_EDGES)
    for prefix in (None, _FILLER, _DENIED, _FILLER):
        if prefix is not None and (left_out := prefix.match(text)) is not None:
            text = text[left_out.end() :].lstrip()
        if (label := _by_text(text, choices)) is not None:
            return label
    reasoned = _REASONED.match(text) if announced else None
    if reasoned is not None and (label := _by_text(reasoned[1], choices)) is not None:
        return label
    match = _LABEL.match(text)
    if match is None or (bool(match[1]) != bool(match[3]) and match[3] != ")"):
        return None
    label, rest = match[2].upper(), text[match.end() :]
    if label not in choices:
        return None
    others = [(found[1] or found[2]) for pattern in (_NEXT, _ALTERNATIVE) if (found := pattern.match(rest))]
    # In `B, a city` the second is a word.
    if any(other.upper() in choices.keys() - {label} for other in others if other.isupper() == match[2].isupper()):
        return _SEVERAL
    said = rest.strip(_EDGES + ")-–—")
    other = _by_text(said, choices)
    if not said or other == label:
        return label
    if other is not None:
        return None
    if match[3] or rest.lstrip()[:1] in _SEPARATORS:
        return label
    # `a` and `I` are words too: followed by text, only a capital that is none of them is a label.
    is_word = match[2] in ("A", "I") and rest[:1].isascii() and not _REASON.match(rest)
    return label if announced and match[2].isupper() and not is_word else None


def _by_text(text: str, choices: Mapping[str, str]) -> str | None:
    """The label of the choice that reads like a text, or is that text; None without one, and where several do."""
    plain = _plain(text)
    same = [label for label, choice in choices.items() if choice and _plain(choice) == plain]
    if plain and not same:
        # A letter alone may be a word.
        written = plain.strip("()[]{}<>").upper()
        same = [label for label in choices if len(label) > 1 and label == written]
    return same[0] if plain and len(same) == 1 else None


def _plain(text: str) -> str:
    return " ".join(text.translate(_MARKUP).split()).strip(_EDGES).casefold()
