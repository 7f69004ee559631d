"""The 25 kinds of instructions of IFEval: from a response and an instruction's arguments to kept or not.

They follow the published descriptions. The published program uses other packages for sentences, words in capitals and
languages. Here these are told by rules of our own (`words`, `languages`). Keywords are texts here, and no regular
expressions. All take linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rollmesh.reward_service.scorers.forms.json_answer import NoJsonError, read
from rollmesh.reward_service.scorers.instructions.languages import is_written_in, may_be_english
from rollmesh.reward_service.scorers.instructions.words import (
    capital_word_count,
    keeps,
    parts_between,
    sentence_count,
    word_count,
)

Check = Callable[..., bool]
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
_HIGHLIGHT = re.compile(r"\*([^\n*]+)\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*")
_CONSTRAINED = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
_POSTSCRIPTS = {"p.s.": re.compile(r"p\.\s?s\."), "p.p.s": re.compile(r"p\.\s?p\.\s?s")}
_FENCES = ("```json", "```Json", "```JSON", "```")


# ---------------------------------------------------------------------------------------------- keywords


def _existence(text: str, *, keywords: list[str]) -> bool:
    lower = text.lower()
    return all(word.lower() in lower for word in keywords)


def _frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return keeps(text.lower().count(keyword.lower()), relation, frequency)


def _forbidden(text: str, *, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letters(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return keeps(text.lower().count(letter.lower()), let_relation, let_frequency)


# ---------------------------------------------------------------------------------------------- language, case


def _language(text: str, *, language: str) -> bool:
    return is_written_in(text, language)


def _capital(text: str) -> bool:
    return text.isupper() and may_be_english(text)


def _lowercase(text: str) -> bool:
    return text.islower() and may_be_english(text)


def _capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return keeps(capital_word_count(text), capital_relation, capital_frequency)


# ---------------------------------------------------------------------------------------------- length


def _sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return keeps(sentence_count(text), relation, num_sentences)


def _words(text: str, *, num_words: int, relation: str) -> bool:
    return keeps(word_count(text), relation, num_words)


def _paragraphs(text: str, *, num_paragraphs: int) -> bool:
    parts = parts_between(text, "***")
    return parts is not None and len(parts) == num_paragraphs


def _first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


# ---------------------------------------------------------------------------------------------- content and format


def _placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(_PLACEHOLDER.findall(text)) >= num_placeholders


def _postscript(text: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip().lower()
    pattern = _POSTSCRIPTS.get(marker)
    return marker in text.lower() if pattern is None else pattern.search(text.lower()) is not None


def _bullets(text: str, *, num_bullets: int) -> bool:
    lines = [line.strip() for line in text.splitlines()]
    starred = sum(line.startswith("*") and len(line) > 1 and line[1] != "*" for line in lines)
    return starred + sum(line.startswith("-") for line in lines) == num_bullets


def _constrained(text: str) -> bool:
    return any(answer in text.lower() for answer in _CONSTRAINED)


def _highlights(text: str, *, num_highlights: int) -> bool:
    found = [*_HIGHLIGHT.findall(text.replace("**", "\n")), *_DOUBLE_HIGHLIGHT.findall(text)]
    return sum(bool(part.strip()) for part in found) >= num_highlights


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    heads = re.findall(rf"{re.escape(section_spliter.strip())}\s?\d", text)
    return len(heads) >= num_sections


def _json(text: str) -> bool:
    text = text.strip()
    fence = next((fence for fence in _FENCES if text.startswith(fence)), "")
    try:
        read(text.removeprefix(fence).removesuffix("```"))
    except NoJsonError:
        return False
    return True


def _title(text: str) -> bool:
    for line in text.splitlines():
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<> \t"):
            return True
    return False


# ---------------------------------------------------------------------------------------------- the whole


def _two_responses(text: str) -> bool:
    parts = parts_between(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def _no_comma(text: str) -> bool:
    return "," not in text


KINDS: Mapping[str, Check] = MappingProxyType(
    {
        "keywords:existence": _existence,
        "keywords:frequency": _frequency,
        "keywords:forbidden_words": _forbidden,
        "keywords:letter_frequency": _letters,
        "language:response_language": _language,
        "length_constraints:number_sentences": _sentences,
        "length_constraints:number_paragraphs": _paragraphs,
        "length_constraints:number_words": _words,
        "length_constraints:nth_paragraph_first_word": _first_word,
        "detectable_content:number_placeholders": _placeholders,
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": _bullets,
        "detectable_format:constrained_response": _constrained,
        "detectable_format:number_highlighted_sections": _highlights,
        "detectable_format:multiple_sections": _sections,
        "detectable_format:json_format": _json,
        "detectable_format:title": _title,
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": _repeat_prompt,
        "startend:end_checker": _end,
        "startend:quotation": _quotation,
        "change_case:capital_word_frequency": _capital_words,
        "change_case:english_capital": _capital,
        "change_case:english_lowercase": _lowercase,
        "punctuation:no_comma": _no_comma,
    }
)


def is_kept(kind: str, text: str, arguments: Mapping[str, Any]) -> bool:
    """True if a response keeps an instruction; an empty response keeps none.

    Raises:
        ValueError: an unknown kind, or arguments that do not fit.
    """
    check = KINDS.get(kind)
    if check is None:
        raise ValueError(f"no instruction is called {kind!r} (known: {', '.join(KINDS)})")
    try:
        return bool(text.strip()) and check(text, **arguments)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{kind}: arguments {dict(arguments)}: {error}") from error
