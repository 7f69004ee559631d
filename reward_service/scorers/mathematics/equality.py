r"""Equality of two answers that math-verify has read, where its own is too coarse or too narrow for a reader.

math-verify compares numbers after six decimals: `10^{-20}` would be `10^{-21}`. Here they agree relative to their size.
A decimal equals an exact truth only where it has the same value: 0.3333333 is not 1/3. A truth that is a decimal itself
is met to six digits.

An equation of numbers must hold: `5=6` is not 6. A list with an entry twice is no shorter one. A list with an ellipsis
is compared as it is written, and numerals of other bases differ. `x \ge 1` is the interval `[1,\infty)`, and the column
of 1 and 2 is the tuple `(1,2)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollmesh.reward_service.scorers.mathematics.parsing import NO_TIMEOUT

if TYPE_CHECKING:
    import sympy

# Relative tolerances: to a truth that is a decimal, and to an exact one.
_COARSE, _FINE = 2e-6, 1e-12
# Digits that are computed of each number.
_DIGITS = 30
# Points at which expressions are compared: all signs of up to three letters.
_POINTS = 8
_ELLIPSIS = re.compile(r"\\[lcd]?dots\b|\.\.\.|…")
_BASE = re.compile(r"[\dA-F]+_\{?(\d+)\}?")
_OR = re.compile(r"\bor\b|\\lor\b|\\vee\b")
_SPACES = re.compile(r"\s|\\[,;: !]|\\left|\\right")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")


def agree(expected: Sequence[Any], found: Sequence[Any], truth: str, answer: str) -> bool:
    """Whether an answer is the truth.

    Args:
        expected, found: as math-verify has parsed the truth and the response.
        truth, answer: as they are written; an answer that was found outside of a box is empty.
    """
    import sympy
    from math_verify import verify

    if not expected or not found:
        return False
    if answer and _SPACES.sub("", truth) == _SPACES.sub("", answer):
        return True
    if answer and not _may_agree(truth, answer):
        return False
    if verify(list(expected), list(found), timeout_seconds=NO_TIMEOUT):
        return _close(expected[0], found[0]) and _holds(found[0], expected[0])
    ours, theirs = _as_set(expected[0], truth), _as_set(found[0], answer)
    if (ours is None) != (theirs is None):
        one, other = [expected[0] if ours is None else ours], [found[0] if theirs is None else theirs]
        return bool(verify(one, other, timeout_seconds=NO_TIMEOUT))
    column = _column(found[0])
    if column is not None and isinstance(expected[0], sympy.Tuple | sympy.Interval):
        return bool(verify([expected[0]], [column], timeout_seconds=NO_TIMEOUT))
    return _same_where_real(expected[0], found[0])


def _may_agree(truth: str, answer: str) -> bool:
    """False for other texts of which the library reads only a part."""
    if _ELLIPSIS.search(truth) or _ELLIPSIS.search(answer):
        return False
    bases = _BASE.fullmatch(_SPACES.sub("", truth)), _BASE.fullmatch(_SPACES.sub("", answer))
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return False
    entries = _entries(truth), _entries(answer)
    return len(entries[0]) == len(entries[1]) or 1 in map(len, entries)


def _entries(text: str) -> list[str]:
    """The entries of a list without brackets; a single one for all else."""
    text = _SPACES.sub("", text)
    if _GROUPED.fullmatch(text) or any(mark in text for mark in "{[()]}"):
        return [text]
    return text.split(",")


def _close(truth: Any, answer: Any) -> bool:
    """Whether numbers, alone or in equal places of sets, tuples and intervals, agree relative to their size."""
    import sympy

    pairs = [(_value(truth), _value(answer))]
    for kind in (sympy.FiniteSet, sympy.Tuple, sympy.Interval):
        if isinstance(truth, kind) and isinstance(answer, kind) and len(truth.args) == len(answer.args):
            ordered = [list(value.args) for value in (truth, answer)]
            if kind is sympy.FiniteSet and all(each.is_number for entries in ordered for each in entries):
                ordered = [sorted(entries, key=lambda entry: sympy.re(entry).evalf()) for entries in ordered]
            pairs = list(zip(*ordered, strict=True))
    return all(_close_numbers(one, other) for one, other in pairs)


def _close_numbers(truth: Any, answer: Any) -> bool:
    """Whether two numbers agree relative to their size; true of anything else, and of what is not finite."""
    import sympy

    if not (getattr(truth, "is_number", False) and getattr(answer, "is_number", False)):
        return True
    one, other = truth.evalf(_DIGITS), answer.evalf(_DIGITS)
    if not (one.is_finite and other.is_finite):
        return True
    size = max(abs(one), abs(other))
    tolerance = _COARSE if truth.has(sympy.Float) else _FINE
    return bool(size == 0 or abs(one - other) <= tolerance * size)


def _value(answer: Any) -> Any:
    """The right side of an equation `x = 5`; an answer as it is otherwise."""
    import sympy

    return answer.rhs if isinstance(answer, sympy.Equality) else answer


def _holds(answer: Any, truth: Any) -> bool:
    """Whether all equations of two numbers in an answer are true; not asked where the truth is an equation too."""
    import sympy

    if isinstance(truth, sympy.Equality | sympy.And) or not isinstance(answer, sympy.Basic):
        return True
    return all(
        _close_numbers(equation.lhs, equation.rhs)
        for equation in answer.atoms(sympy.Equality)
        if equation.lhs.is_number and equation.rhs.is_number
    )


def _as_set(answer: Any, text: str) -> sympy.Set | None:
    """The numbers that inequalities of one letter leave; None for anything else.

    Args:
        answer: as it was read: a set of inequalities between which its text has a comma, or the word `or`.
        text: of the answer.
    """
    import sympy
    from sympy import GreaterThan, LessThan, StrictGreaterThan, StrictLessThan

    if isinstance(answer, sympy.FiniteSet) and answer.args and len(answer.free_symbols) == 1 and _OR.search(text):
        parts = [_as_set(part, text) for part in answer.args]
        return None if None in parts else sympy.Union(*parts)
    relations = answer.args if isinstance(answer, sympy.And) else (answer,)
    simple = all(
        isinstance(relation, LessThan | StrictLessThan | GreaterThan | StrictGreaterThan)
        and {side.is_Symbol or side.is_number for side in relation.args} == {True}
        for relation in relations
    )
    if not simple or len(answer.free_symbols) != 1:
        return None
    return answer.as_set()


def _column(answer: Any) -> sympy.Tuple | None:
    """The entries of a matrix with one row or column."""
    import sympy

    if isinstance(answer, sympy.MatrixBase) and 1 in answer.shape:
        return sympy.Tuple(*answer)
    return None


def _same_where_real(truth: Any, answer: Any) -> bool:
    r"""Whether two expressions with roots of letters agree where both are real: `1/\sqrt{n}` and `\sqrt{1/n}` do."""
    import sympy

    if not all(isinstance(each, sympy.Expr) and _has_root(each) and not _has_tower(each) for each in (truth, answer)):
        return False
    letters = sorted(truth.free_symbols, key=str)
    if truth.free_symbols != answer.free_symbols:
        return False
    compared = 0
    for place in range(_POINTS):
        point = {letter: sympy.Rational((-1) ** (place >> turn) * (37 + 10 * turn + place), 29)
                 for turn, letter in enumerate(letters)}  # fmt: skip
        one, other = (each.subs(point).evalf(_DIGITS) for each in (truth, answer))
        if one.is_real and other.is_real:
            compared += 1
            if not _close_numbers(one, other):
                return False
    return compared > 1


def _has_root(answer: Any) -> bool:
    import sympy

    return any(power.base.free_symbols and not power.exp.is_integer for power in answer.atoms(sympy.Pow))


def value_text(parsed: Sequence[Any]) -> str:
    """The text by which answers of one value are told from others; empty for one that was not read."""
    if not parsed:
        return ""
    try:
        return _value_text(parsed[0])
    except Exception:  # noqa: BLE001 - a computer algebra system may fail in any way
        return _SPACES.sub("", str(parsed[-1]))


def _value_text(answer: Any) -> str:
    import sympy

    answer = _value(answer)
    if isinstance(answer, sympy.FiniteSet | sympy.Tuple | sympy.Interval):
        parts = [_value_text(part) for part in answer.args]
        return f"{type(answer).__name__}({', '.join(sorted(parts) if isinstance(answer, sympy.FiniteSet) else parts)})"
    if isinstance(answer, sympy.Expr) and not _has_tower(answer):
        # At an arbitrary point, expressions of one value have the same number.
        letters = sorted(answer.free_symbols, key=str)
        point = {letter: sympy.Rational(37 + 10 * place, 29) for place, letter in enumerate(letters)}
        return f"{','.join(map(str, letters))}:{sympy.N(answer.subs(point), 9)}"
    return _SPACES.sub("", str(answer))


def _has_tower(answer: Any) -> bool:
    """Whether there is a power with a power in its exponent, which no computer evaluates."""
    import sympy

    return any(power.exp.has(sympy.Pow) for power in answer.atoms(sympy.Pow))
