r"""Spellings of mathematics that people use and math-verify does not know, in the words of those that it does. Pure.

`13\,500` is a number, and so are `3e8` and `42元`. `\textbf{(C) } 12`, as competitions write choices, is 12.
`\varnothing` is the empty set, as is `no solution`. The degrees of an angle count within a sine, and `答案是42` has its
number apart.
"""

from __future__ import annotations

import re

from rollmesh.reward_service.scorers.boxes import last_braced_box
from rollmesh.reward_service.scorers.numbers import plain_marks

# Scripts that are written without spaces, and their stops.
_UNSPACED = "\u3001-\u30ff\u4e00-\u9fff\uac00-\ud7af"
_BEFORE_NUMBER = re.compile(rf"(?<=[{_UNSPACED}:])(?=[-+$\\\d])")
_AFTER_NUMBER = re.compile(rf"(?<=[\d$}}])(?=[{_UNSPACED}])")
_DEGREES = r"(\d+(?:\.\d+)?) ?\^(?:\\circ|\{ ?\\circ ?\})"
_ANGLE = re.compile(
    rf"\\(sin|cos|tan|cot|sec|csc) ?(?:(?:\\left)?\( ?{_DEGREES} ?(?:\\right)?\)|\{{ ?{_DEGREES} ?\}}|{_DEGREES})"
)
_THOUSANDS = re.compile(r"([-+]?\d{1,3})((?:(?:\\[,;: ]|\\thinspace ?|[ ~])\d{3})+)(?![\d\s]*\d)")
_SPACE = re.compile(r"\\[,;: ]|\\thinspace ?|[ ~]")
_EXPONENT = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})")
# The letter of a choice before its content, as in competitions.
_CHOICE = re.compile(r"\\(?:text|math)(?:bf|rm)?\{ ?\([A-E]\) ?\}(?:\\[,;: ]|\\q?quad|[ ~])*(?=\S)")
_PREFIX = re.compile(rf"[{_UNSPACED}]+:? ?(?=[-+$\\\d])")
_UNIT = re.compile(rf"(.*[\d}}]) ?(?:\\(?:text|mathrm)\{{)? ?[{_UNSPACED}]{{1,6}} ?\}}?", re.DOTALL)
_NOTHING = re.compile(
    r"(?:\\text\{)? ?(?:there (?:is|are) )?(?:no (?:real )?(?:solutions?|roots?)|无解|無解|解なし|sin solución"
    r"|aucune solution|keine lösung(?:en)?|нет решений|nessuna soluzione|sem solução) ?\.? ?\}?",
    re.IGNORECASE,
)


def spelled_response(text: str) -> str:
    """A response in which the content of the last box, or without one the text around numbers, is spelled so."""
    text = _spelled(text)
    boxed = last_braced_box(text)
    if boxed is None:
        return _AFTER_NUMBER.sub(" ", _BEFORE_NUMBER.sub(" ", text))
    begin = text.rfind(r"\boxed{") + len(r"\boxed{")
    return f"{text[:begin]}{spelled_answer(boxed)}{text[begin + len(boxed) :]}"


def with_closed_box(text: str) -> str:
    """A response whose last box ends with its line, where the response does not close it."""
    begin = text.rfind(r"\boxed{")
    if begin < 0 or last_braced_box(text) is not None:
        return text
    line, stop, rest = text[begin:].partition("\n")
    line = line.rstrip(" \t\r$.")
    return f"{text[:begin]}{line}{'}' * (line.count('{') - line.count('}'))}{stop}{rest}"


def spelled_answer(answer: str) -> str:
    """An answer, such as the content of a box, spelled so."""
    answer = _spelled(answer).strip()
    if _NOTHING.fullmatch(answer):
        return r"\emptyset"
    if (choice := _CHOICE.match(answer)) is not None:
        answer = answer[choice.end() :]
    answer = _PREFIX.sub("", answer)
    if (with_unit := _UNIT.fullmatch(answer)) is not None:
        answer = with_unit[1]
    answer = _THOUSANDS.sub(lambda number: number[1] + _SPACE.sub("", number[2]), answer)
    if (scientific := _EXPONENT.fullmatch(answer)) is not None:
        answer = rf"{scientific[1]} \times 10^{{{int(scientific[2])}}}"
    return answer


def _spelled(text: str) -> str:
    text = plain_marks(text).replace(r"\varnothing", r"\emptyset")
    return _ANGLE.sub(lambda angle: rf"\{angle[1]}(\frac{{{angle[2] or angle[3] or angle[4]}\pi}}{{180}})", text)
