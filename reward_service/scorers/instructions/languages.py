"""Telling languages apart by their script and by their most frequent words; enough for a text of a few sentences."""

# ruff: noqa: RUF001  # letters of other scripts that look like Latin ones

from __future__ import annotations

import unicodedata
from collections import Counter

# More of a text does not change the answer.
_READ = 20_000
_EDGES = ".,;:!?\"'“”‘’«»()[]{}*_#-–—。、।؟،¿¡…"
# The first word of a letter's Unicode name -> languages that are written so.
_SCRIPTS: dict[str, tuple[str, ...]] = {
    "LATIN": ("en", "es", "fr", "de", "it", "pt", "pl", "fi", "sw", "vi", "nl"),
    "CYRILLIC": ("ru", "uk", "bg"),
    "ARABIC": ("ar", "fa", "ur"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "BENGALI": ("bn",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
    "HANGUL": ("ko",),
    "HEBREW": ("he",),
    "KANNADA": ("kn",),
    "MALAYALAM": ("ml",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "THAI": ("th",),
    "GREEK": ("el",),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "CJK": ("zh",),
}
# Where several languages share a script: their most frequent words.
_WORDS = {
    "en": "the of and to in is that it for was with are this be have from you not by or as at they",
    "es": "la el de que y en los del las un por con para una su al es lo como más pero sus este son",
    "fr": "le la les de des et en un une du que est pour dans qui sur pas au plus ne avec je vous ce sont cette",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es ich sind",
    "it": "di che il la e in un per è non una sono da del con si come più le dei della gli nel anche questo",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como são ao",
    "pl": "w i na się z do nie to jest że o jak po co tak ale od przez dla są oraz który tym",
    "fi": "ja on ei se että hän oli ovat mutta kuin joka myös tai kun niin sen tämä ole voi olla ovat",
    "sw": "ya na wa kwa ni katika za la kuwa cha hii yake kama lakini hiyo watu au sana kwamba pia",
    "vi": "và của là có trong cho được không một các những với để này người khi đã từ như rất",
    "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als bij maar",
    "ru": "и в не на что он с как это по но из за то все его так для я вы мы или также",
    "uk": "і в не на що з та як до це він але за від є й про у для ви ми або також",
    "bg": "и на в да се за от не са с по като е че това но си ще има или може",
    "ar": "في من على أن إلى هذا التي عن مع كان لا هذه ما هو الذي و يمكن هي",
    "fa": "و در به از که این را با است برای آن یک می خود بر تا های شما",
    "ur": "کے میں کی ہے اور سے کا کو اس نے پر ہیں یہ کہ ایک بھی آپ",
    "hi": "के में की है और से का को इस ने पर हैं यह कि एक भी नहीं लिए",
    "mr": "आहे आणि या मध्ये हे ते ही आहेत की साठी त्या नाही आपल्या होते",
    "ne": "छ र को मा यो पनि हरू गर्न भएको छन् लागि हो गरेको छैन",
}
_FREQUENT = {language: frozenset(words.split()) for language, words in _WORDS.items()}
KNOWN = frozenset(language for languages in _SCRIPTS.values() for language in languages)


def languages(text: str) -> frozenset[str]:
    """The languages that a text may be in; more than one where nothing tells them apart, none without letters."""
    text = text[:_READ]
    scripts = Counter(unicodedata.name(char, "").partition(" ")[0] for char in text if char.isalpha())
    if scripts["HIRAGANA"] + scripts["KATAKANA"]:  # Japanese has Chinese characters too
        scripts["HIRAGANA"] += scripts.pop("CJK", 0)
    known = [(count, script) for script, count in scripts.items() if script in _SCRIPTS]
    if not known:
        return frozenset()
    written = _SCRIPTS[max(known)[1]]
    if len(written) == 1:
        return frozenset(written)
    words = [word.strip(_EDGES) for word in text.lower().split()]
    found = {language: sum(word in _FREQUENT[language] for word in words) for language in written}
    most = max(found.values())
    return frozenset(language for language, count in found.items() if count == most)


def is_written_in(text: str, language: str) -> bool:
    """True if a text is in a language and in no other, as far as can be told.

    Raises:
        ValueError: the language is not known here.
    """
    code = language.strip().lower().partition("-")[0]
    if code not in KNOWN:
        raise ValueError(f"the language {language!r} is not known (known: {', '.join(sorted(KNOWN))})")
    return languages(text) == {code}


def may_be_english(text: str) -> bool:
    """True unless something in a text tells that it is in another language."""
    return "en" in languages(text)
