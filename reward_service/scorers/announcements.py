"""Phrases that announce an answer, in the languages in which models write, and the thoughts that come before it."""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

import re
from collections.abc import Iterator

# At most so much of a row is an answer.
_LONGEST = 400
_IS = r"(?:is|was|would be|should be|must be|has to be|can only be)"
# A wrong answer is announced too, and so is one that is not chosen.
_NOT_WRONG = r"(?<!wrong )(?<!incorrect )(?<!false )"
_NOT_DENIED = r"(?<!not )(?<!n't )(?<!n’t )(?<!never )"
_ENGLISH = (
    rf"{_NOT_WRONG}\banswer\b(?:[ \t]{{1,4}}{_IS}\b)?[*_]{{0,2}}[ \t]{{0,4}}[:=–-]?",
    rf"{_NOT_DENIED}\b(?:choose|pick|select|go with)[*_]{{0,2}}[ \t]{{1,4}}(?:is\b|:)?",
    rf"\b(?:correct|right|best|final)[ \t]{{1,4}}(?:answer|option|choice)[*_]{{0,2}}[ \t]{{0,4}}(?:{_IS}\b|:|=)",
)
# Noun, and the words that may join it to the answer.
_SPACED = (
    (r"respuesta|opción correcta", r"correcta|final|es|sería"),
    (r"réponse|bonne option", r"correcte|finale|est|serait"),
    (r"resposta|alternativa correta|opção correta", r"correta|final|é|seria"),
    (r"risposta|opzione corretta", r"corretta|finale|è|sarebbe"),
    (r"antwort|lösung", r"ist|lautet|wäre"),
    (r"antwoord", r"is|luidt"),
    (r"odpowiedź|odpowiedzią", r"to|jest|brzmi"),
    (r"ответ|відповідь", r"это|це"),
    (r"cevap|yanıt", r""),
    (r"đáp án|câu trả lời", r"đúng|là"),
    (r"jawaban|jawabannya", r"adalah|yang benar"),
    (r"الإجابة|الجواب|پاسخ", r"الصحيحة|الصحيح|النهائية|هي|هو"),
    (r"उत्तर|जवाब", r"है"),
)
_UNSPACED = (
    r"(?<!不)(?<!不能)(?:正确)?(?:答案|选项|選項|選択肢)(?:应该|应|應該|應)?(?:是|为|為|选|選|应选|應選)?",
    r"(?<!不)(?<!不能)(?<!别)(?:选择|選擇|选|選)",
    r"(?:答え|正解|解答)(?:は)?",
    r"(?:정답|답|답안)(?:은|는)?",
    r"คำตอบ(?:คือ)?",
)
_OTHERS = (
    *(
        rf"\b(?:{noun})\b(?:[ \t]{{1,4}}(?:{joint})\b){{0,3}}" if joint else rf"\b(?:{noun})\b"
        for noun, joint in _SPACED
    ),
    *_UNSPACED,
)
_ANNOUNCED = re.compile(
    rf"(?:####|{'|'.join(_ENGLISH)}|(?:{'|'.join(_OTHERS)})[*_]{{0,2}}[ \t]{{0,4}}[:=—-]?)"
    rf"(?=[ \t]{{0,4}}([^\n]{{1,{_LONGEST}}}))",
    re.IGNORECASE,
)
_END_OF_THOUGHTS = "</think>"


def announced(text: str) -> Iterator[tuple[int, str]]:
    """The texts that phrases of a text announce, up to the ends of their rows, with the places where they begin.

    Args:
        text: with plain marks (`numbers.plain_marks`); its length is the caller's concern.
    """
    for match in _ANNOUNCED.finditer(text):
        yield match.start(1), match[1]


def after_thoughts(response: str) -> str:
    """The text after the thoughts of a response; all of it where it has none, or nothing after them."""
    _, _, said = response.rpartition(_END_OF_THOUGHTS)
    return said if said.strip() else response
