r"""Multiple choice: 1 if the answer names the right one, by its label or by its text.

The choices are `extra_info.choices` (or `options`). They are a list of texts with the labels A, B, C and so on, an
object from label to text, or ARC's `{"label": [...], "text": [...]}`. Without them any label from A to Z is an answer.
The ground truth is a label, a text, or the place of a choice, counted from 0, where no label is written like it.

The answer is looked for in this order, and what comes last in the response counts:
  1. `\boxed{B}`
  2. `<answer>B</answer>`
  3. `#### B`, `Answer: B`, `the answer is (B)`, `the correct option is **B**`, `I choose B`
  4. a row that is no more than an answer, `B`, `(B)` or `B. Paris`: the last row, else the first

A place that names two choices names none. Only the last 4,000 characters are read, and the first row.
"""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers import qa
from rollmesh.reward_service.scorers.boxes import last_braced_box

FIELDS = ("choices", "options")
_TAIL = 4000
# Characters of a row that may be no more than an answer.
_ROW = 400
# At most so much stands between a phrase and the answer that it announces.
_ANNOUNCED = re.compile(
    r"(?:####|\banswer\b(?:[ \t]{1,4}(?:is|would be|should be))?[*_]{0,2}[ \t]{0,4}[:=]?"
    r"|\b(?:choose|pick|select)[*_]{0,2}[ \t]{1,4}(?:is|:)?"
    r"|\b(?:correct|right|best|final)[ \t]{1,4}(?:answer|option|choice)[*_]{0,2}[ \t]{0,4}(?:is|:|=))"
    r"(?=[ \t]{0,4}([^\n]{1,400}))",
    re.IGNORECASE,
)
_FILLER = re.compile(r"(?:(?:is|the|option|choice|answer|letter|therefore|clearly)\b[ \t:]{0,4}){1,4}", re.IGNORECASE)
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_LABEL = re.compile(r"([\[(]?)([A-Za-z]|\d{1,2})([\])]?)(?![\w'’])")
_ALTERNATIVE = re.compile(r"[ \t]*(?:,|/|\||&|\band\b|\bor\b)[ \t]*[\[(]?([A-Za-z]|\d{1,2})[\])]?(?![\w'’])")
_SEPARATORS = frozenset(".:),;-–—")
_REASON = re.compile(r"[ \t]*(?:because|since|as|due|based|given)\b", re.IGNORECASE)
# Another label that is written like one.
_NEXT = re.compile(r"[ \t.,;:)]*(?:[\[(]([A-Za-z]|\d{1,2})[\])]|([A-Za-z]|\d{1,2})(?=[.):,]|[ \t]*$))")
_MARKUP = str.maketrans("", "", "*_$`~")
_EDGES = string.whitespace + ".,;:!?\"'“”‘’"


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
        labels, texts = list(given), list(given.values())
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
    if truth is None or isinstance(truth, bool):
        return None
    written = str(truth).strip()
    label = written.strip("()[]. ").upper()
    if label in choices:
        return label
    if not isinstance(truth, int) and (same := _by_text(written, choices)) is not None:
        return same
    if written.isdecimal() and len(written) < 4 and int(written) < len(choices):
        return list(choices)[int(written)]
    return None


def chosen_label(response: str, choices: Mapping[str, str]) -> str | None:
    """The label that a response names, as the module says; None where it names none, or several at once."""
    for place, announced in _places(response):
        if (label := _named(place, choices, announced=announced)) is not None:
            return label
    return None


def score(item: RewardItem) -> Outcome:
    """1.0 or 0.0, with the component `format` (an answer was found); unscorable without a usable ground truth."""
    try:
        choices = choices_of(item)
    except ValueError as error:
        return Unscorable(f"extra_info.choices: {error}")
    truth = right_label(item.ground_truth, choices)
    if truth is None:
        return Unscorable(f"the ground truth is none of the choices {', '.join(choices)}: {item.ground_truth!r}")
    chosen = chosen_label(item.response, choices)
    return Scored(float(chosen == truth), {"format": float(chosen is not None)})


def _places(response: str) -> Iterator[tuple[str, bool]]:
    """Texts that may be the answer, those that say so most clearly first, and whether they say so at all."""
    tail = response[-_TAIL:]
    # An empty box or tag is an answer too, though none of the choices: what else is written does not count.
    if (boxed := last_braced_box(tail)) is not None:
        yield boxed, True
        return
    if (tagged := qa.extract(tail)) is not None:
        yield tagged, True
        return
    yield from reversed([(match[1], True) for match in _ANNOUNCED.finditer(tail)])
    rows = tail.rstrip().rsplit("\n", 1)
    first = response.lstrip()[: _ROW + 1].split("\n", 1)[0]
    yield from ((row, False) for row in (rows[-1], first) if len(row) <= _ROW)


def _named(place: str, choices: Mapping[str, str], *, announced: bool) -> str | None:
    """The one choice that a text names; where nothing announces it, the text is no more than the answer."""
    text = _LATEX_TEXT.sub(r"\1", place).translate(_MARKUP).strip(_EDGES)
    if (label := _by_text(text, choices)) is not None:
        return label
    filler = _FILLER.match(text)
    text = text[filler.end() :].lstrip() if filler else text
    if (label := _by_text(text, choices)) is not None:
        return label
    match = _LABEL.match(text)
    if match is None or (bool(match[1]) != bool(match[3]) and match[3] != ")"):
        return None
    label, rest = match[2].upper(), text[match.end() :]
    following = _NEXT.match(rest)
    listed = following is not None and {(following[1] or following[2]).upper()} & choices.keys() - {label}
    if label not in choices or listed or _ALTERNATIVE.match(rest):
        return None
    said = rest.strip(_EDGES + ")-–—")
    other = _by_text(said, choices)
    if not said or other == label:
        return label
    if other is not None:
        return None
    if match[3] or rest.lstrip()[:1] in _SEPARATORS:
        return label
    # `a` and `I` are words too: followed by text, only a capital that is none of them is a label.
    return label if announced and (match[2] not in ("A", "I") or _REASON.match(rest)) and match[2].isupper() else None


def _by_text(text: str, choices: Mapping[str, str]) -> str | None:
    """The label of the choice that reads like a text; None without one, and where several do."""
    plain = _plain(text)
    same = [label for label, choice in choices.items() if choice and _plain(choice) == plain]
    return same[0] if plain and len(same) == 1 else None


def _plain(text: str) -> str:
    return " ".join(text.translate(_MARKUP).split()).strip(_EDGES).casefold()
