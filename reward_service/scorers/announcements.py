"""Phrases that announce an answer, in the languages in which models write."""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

import re

# Characters of a line that may be an answer.
_LONGEST = 400
_IS = r"(?:is|was|would be|should be|must be|has to be|can only be)"
# A wrong answer is announced too, and so is one that is not chosen.
_NOT_WRONG = r"(?<!wrong )(?<!incorrect )(?<!false )"
_NOT_DENIED = r"(?<!not )(?<!n't )(?<!n’t )(?<!never )"
# A dash before a number is its sign.
_MARK = r"[*_]{0,2}[ \t]{0,4}(?:[:=]|[–—-](?=[ \t]))?"
# Words, and a phrase with one of them.
_PHRASES = (
    (("####",), "####"),
    (("answer",), rf"{_NOT_WRONG}\banswer\b(?:[ \t]{{1,4}}{_IS}\b)?{_MARK}"),
    (
        ("choose", "pick", "select", "go with"),
        rf"{_NOT_DENIED}\b(?:choose|pick|select|go with)[*_]{{0,2}}[ \t]{{1,4}}(?:is\b|:)?",
    ),
    (
        ("option", "choice"),
        rf"\b(?:correct|right|best|final)[ \t]{{1,4}}(?:option|choice)[*_]{{0,2}}[ \t]{{0,4}}(?:{_IS}\b|:|=)",
    ),
)
# Nouns, and the words that may join them to the answer.
_SPACED = (
    ("respuesta|opción correcta", "correcta|final|es|sería"),
    ("réponse|bonne option", "correcte|finale|est|serait"),
    ("resposta|alternativa correta|opção correta", "correta|final|é|seria"),
    ("risposta|opzione corretta", "corretta|finale|è|sarebbe"),
    ("antwort|lösung", "ist|lautet|wäre"),
    ("antwoord", "is|luidt"),
    ("odpowiedź|odpowiedzią", "to|jest|brzmi"),
    ("ответ|відповідь", "это|це"),
    ("cevap|yanıt", ""),
    ("đáp án|câu trả lời", "đúng|là"),
    ("jawaban|jawabannya", "adalah|yang benar"),
    ("الإجابة|الجواب|پاسخ", "الصحيحة|الصحيح|النهائية|هي|هو"),
    ("उत्तर|जवाब", "है"),
)
# Words of scripts without spaces, and a phrase with one of them.
_UNSPACED = (
    (
        ("答案", "选项", "選項", "選択肢"),
        r"(?<!不)(?<!不能)(?:正确)?(?:答案|选项|選項|選択肢)(?:应该|应|應該|應)?(?:是|为|為|选|選|应选|應選)?",
    ),
    (("答:",), "答(?=:)"),
    (("选", "選"), r"(?<!不)(?<!不能)(?<!别)(?:选择|選擇|选|選)"),
    (("答え", "正解", "解答"), r"(?:答え|正解|解答)(?:は)?"),
    (("답",), r"(?:정답|답안|답)(?:은|는)?"),
    (("คำตอบ",), r"คำตอบ(?:คือ)?"),
)


def _compiled(phrase: str) -> re.Pattern[str]:
    return re.compile(rf"{phrase}(?=[ \t]{{0,4}}([^\n]{{1,{_LONGEST}}}))", re.IGNORECASE)


_ANNOUNCED = (
    *((words, _compiled(phrase)) for words, phrase in _PHRASES),
    *(
        (tuple(nouns.split("|")), _compiled(rf"\b(?:{nouns})\b(?:[ \t]{{1,4}}(?:{joint})\b){{0,3}}{_MARK}"))
        for nouns, joint in _SPACED
    ),
    *((words, _compiled(phrase + _MARK)) for words, phrase in _UNSPACED),
)
"""Words in small letters, without one of which a pattern cannot match, and the pattern."""


def announced(text: str) -> list[tuple[int, str]]:
    """The texts that phrases of a text announce, up to the ends of their lines, with the places where they begin.

    Args:
        text: with plain marks (`numbers.plain_marks`); its length is the caller's concern.

    Returns:
        In the order of the text.
    """
    small = text.lower()
    return sorted(
        (match.start(1), match[1])
        for words, pattern in _ANNOUNCED
        if any(word in small for word in words)
        for match in pattern.finditer(text)
    )
