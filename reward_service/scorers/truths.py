"""Readings of ground truths: each scorer names the one that it means, and whatever is no such truth is unscorable.

A reading takes a truth as its row has it, and gives it in the one form that the scorer compares. Else it raises
`TruthError` with the reason and a remedy. Nothing is guessed. A truth in another form is never compared, so that it
cannot make a right response wrong.

- `one_text`: a text or a number.
- `one_number`: a number, or a text that is one.
- `texts`: a text or a number, or a list of these, which are alternatives.

A list that holds one text is that text for all of them. A number in the place of a text is written without an exponent,
and without the `.0` that a table gives to whole numbers. True and false, NaN, and what is empty are no ground truth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Generic, TypeVar

from rollmesh.mesh.text import bounded
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Unscorable
from rollmesh.reward_service.scorers.numbers import parse_number

T = TypeVar("T")
# Characters of a truth in a reason.
_SHOWN = 120
# Characters of a text that may be the JSON of a list.
_JSON_LENGTH = 1 << 16
# Texts that a table or a serializer leaves where there was no value.
_MISSING = frozenset({"[]", "{}", "null", "nan", "NaN"})


class TruthError(ValueError):
    """A row has no ground truth of the form that its scorer means."""


@dataclass(frozen=True, slots=True)
class TruthScorer(Generic[T]):
    """A scorer that compares with a ground truth.

    Attributes:
        read: the truth of an item's row, in the form that is compared; `TruthError` without one.
        judge: compares a response with it.
    """

    read: Callable[[RewardItem], T]
    judge: Callable[[RewardItem, T], Outcome]

    def __call__(self, item: RewardItem) -> Outcome:
        """The outcome; unscorable without a usable truth."""
        try:
            truth = self.read(item)
        except TruthError as error:
            return Unscorable(str(error))
        return self.judge(item, truth)

    def fault(self, item: RewardItem) -> str:
        """The reason why no response to an item's prompt can be scored; empty if they can."""
        try:
            self.read(item)
        except TruthError as error:
            return str(error)
        return ""


def compares_with(read: Callable[[Any], T]) -> Callable[[Callable[[RewardItem, T], Outcome]], TruthScorer[T]]:
    """Makes a scorer of a function of an item and its truth; `read` takes the `ground_truth` alone."""
    return lambda judge: TruthScorer(lambda item: read(item.ground_truth), judge)


def uses_row(read: Callable[[RewardItem], T]) -> Callable[[Callable[[RewardItem, T], Outcome]], TruthScorer[T]]:
    """The same where the truth is made of the whole row: `read` takes the item."""
    return lambda judge: TruthScorer(read, judge)


def one_text(truth: Any) -> str:
    """The one text that a truth is.

    Raises:
        TruthError: it is none, empty, or one of several.
    """
    truth = _unpacked(truth)
    if isinstance(truth, str) and (truth.strip() in _MISSING or fields_of(truth)):
        raise TruthError(f"the ground truth is no answer: {shown(truth)}; give the answer in it as a text")
    if isinstance(truth, list):
        hint = "give one of them; alternatives are read by exact_match, strings and qa"
        raise TruthError(f"the ground truth is a list of {len(truth)}, and one answer is meant: {shown(truth)}; {hint}")
    return _text(truth)


def texts(truth: Any) -> list[str]:
    """The accepted texts, at least one, white space around them aside; of a number, its usual spellings.

    Raises:
        TruthError: there is none, or one that is no text; or it is the JSON text of a list of texts. That may be meant
            as it is, or as that list.
    """
    if isinstance(truth, str) and _decoded(truth) is not None:
        hint = "give the list itself, where its entries are accepted, or a list with this text in it"
        raise TruthError(f"the ground truth is the JSON text of a list: {shown(truth)}; {hint}")
    return alternatives(truth)


def alternatives(truth: Any) -> list[str]:
    """The same where the JSON text of a list can only mean that list."""
    truth = _unpacked(truth)
    entries = truth if isinstance(truth, list) else [truth]
    return [text for entry in entries for text in _spellings(entry)]


def one_number(truth: Any) -> Fraction:
    """The number that a truth is.

    Raises:
        TruthError: it is none.
    """
    value = parse_number(one_text(truth))
    if value is None:
        raise TruthError(f"the ground truth is not a number: {shown(truth)}")
    return value


def fields_of(truth: Any) -> Mapping[str, Any] | None:
    """The object that a truth is, or is the JSON of; None for any other truth."""
    if isinstance(truth, str) and truth.lstrip().startswith("{") and len(truth) <= _JSON_LENGTH:
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            return None
    return truth if isinstance(truth, Mapping) else None


def shown(truth: Any) -> str:
    """A truth for the reader of a reason."""
    return bounded(repr(truth), _SHOWN)


def _unpacked(truth: Any) -> Any:
    """A truth without the list around a single one, and with the list that a text is the JSON of."""
    if isinstance(truth, str):
        decoded = _decoded(truth)
        truth = truth if decoded is None else decoded
    if isinstance(truth, tuple):
        truth = list(truth)
    if not isinstance(truth, list):
        return truth
    if not truth:
        raise TruthError("the ground truth is an empty list")
    return truth[0] if len(truth) == 1 and not isinstance(truth[0], list) else truth


def _decoded(text: str) -> list[str] | None:
    """The list of texts that a text is the JSON of; None for any other text, such as the interval `[0, 1]`."""
    text = text.strip()
    if not (text.startswith('["') and text.endswith('"]') and len(text) <= _JSON_LENGTH):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if all(isinstance(entry, str) for entry in found) else None


def _text(truth: Any) -> str:
    return _spellings(truth)[0]


def _spellings(truth: Any) -> list[str]:
    """The text that a truth is, or the spellings of a number, the plainest one first."""
    if truth is None:
        raise TruthError("the row has no ground truth")
    if isinstance(truth, str):
        if not truth.strip():
            raise TruthError("the ground truth is an empty text")
        return [truth.strip()]
    if isinstance(truth, bool) or not isinstance(truth, int | float):
        hint = "write it as a text" if isinstance(truth, bool) else "give the answer in it as a text"
        raise TruthError(f"the ground truth is no text and no number: {shown(truth)}; {hint}")
    if not math.isfinite(truth):
        raise TruthError(f"the ground truth is {truth}, not a number: is the column's value missing?")
    plain = format(Decimal(repr(truth)), "f")
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    return list(dict.fromkeys([plain, repr(truth)]))
