"""IFEval's kinds of instructions: each kept and not kept, and rows in all their forms."""

# ruff: noqa: RUF001  # letters of other scripts are what is tested

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmesh.reward_service.outcomes import RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers import SCORERS
from rollmesh.reward_service.scorers.instructions.kinds import KINDS, is_kept
from rollmesh.reward_service.scorers.instructions.languages import is_written_in, languages
from rollmesh.reward_service.scorers.instructions.words import capital_word_count, sentence_count, word_count

ENGLISH = "the quick brown fox is in the garden, and it was not with us"
# Kind, arguments, a response that keeps it, one that does not.
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["fox", "C++"]}, "A Fox in c++.", "a fox in C"),
    ("keywords:frequency", {"keyword": "fox", "frequency": 2, "relation": "at least"}, "fox Fox", "fox"),
    ("keywords:frequency", {"keyword": "fox", "frequency": 2, "relation": "less than"}, "fox", "fox fox"),
    ("keywords:forbidden_words", {"forbidden_words": ["fox"]}, "foxes", "a FOX."),
    ("keywords:letter_frequency", {"letter": "o", "let_frequency": 2, "let_relation": "at least"}, "Oo", "o"),
    ("language:response_language", {"language": "de"}, "Das ist nicht der Hund und die Katze.", ENGLISH),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two", "One two"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a *** b *** c"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
        'One here.\n\n"weekend", it says.',
        "Weekend.\n\nOther",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [address]", "[name], [[]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP. S. more", "PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p.p.s. more", "P.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b\n**c**", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\nand section two",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Joy>>\ntext", "<< >> text"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "Any more?"}, 'x. any more?"', "Any more? x"),
    ("startend:quotation", {}, '"all of it"', 'all "of it"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "A NO-ONE",
        "AN o",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), "The fox"),
    ("change_case:english_capital", {}, "TRY AGAIN", "DER HUND IST NICHT DIE KATZE"),
    ("change_case:english_lowercase", {}, ENGLISH, "The fox"),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
]


@pytest.mark.parametrize(("kind", "arguments", "kept", "broken"), CASES)
def test_each_kind(kind: str, arguments: dict[str, Any], kept: str, broken: str) -> None:
    assert is_kept(kind, kept, arguments)
    assert not is_kept(kind, broken, arguments)
    assert not is_kept(kind, " \n", arguments), "an empty response keeps nothing"


def test_all_25_are_tried() -> None:
    assert len(KINDS) == 25
    assert {kind for kind, *_ in CASES} == KINDS.keys()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two! Three?", 3),
        ("Dr. Who paid 3.50 to e.g. J. Smith. Yes...", 2),
        ('He said "Go." Then he left.', 2),
        ("1. First item.\n2. Second item.", 2),
        ("It was 5 p.m.", 1),
        ("一。二。", 2),
        ("... !!! ?", 0),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert sentence_count(text) == count


def test_words() -> None:
    assert word_count("don't stop") == 3
    assert capital_word_count("I saw NASA's X-RAY in AN a 42") == 3


TEXTS = {
    "en": "This is not the answer that you want to have.",
    "es": "Esta no es la respuesta que se espera de los alumnos en una escuela.",
    "fr": "Ce n'est pas la réponse que vous attendez dans les écoles.",
    "de": "Das ist nicht die Antwort, die ich von dir haben will.",
    "it": "Non è la risposta che gli studenti sono abituati a dare nel compito.",
    "pt": "Não é a resposta que os alunos dão em uma escola, mas é como ela é.",
    "pl": "To nie jest odpowiedź, która się podoba, ale tak to jest na świecie.",
    "fi": "Tämä ei ole se vastaus, joka on oikea, mutta se on hyvä.",
    "sw": "Hii ni nchi ya watu wa pwani na kwa sababu hiyo ni nzuri sana.",
    "vi": "Đây là một câu trả lời không được cho những người học.",
    "ru": "Это не тот ответ, который мы хотели бы, но он есть и для вас.",
    "uk": "Це не та відповідь, яку ми хотіли б, але вона є і для вас.",
    "bg": "Това не е отговорът, който искаме, но ще го има и за вас.",
    "ar": "هذا هو الجواب الذي كان من أن يأتي على ما في الكتاب.",
    "fa": "این پاسخ است که از آن ما را به خانه می برد و برای شما است.",
    "ur": "یہ جواب ہے اور اس کے لیے آپ کو انتظار نہیں کرنا ہے۔",
    "hi": "यह उत्तर है और इस के लिए आप को इंतजार नहीं करना है।",
    "mr": "हे उत्तर आहे आणि ते या पुस्तकामध्ये नाही.",
    "ne": "यो उत्तर हो र यसको लागि धेरै समय लाग्छ भएको छ।",
    "bn": "এটি উত্তর।", "gu": "આ જવાબ છે.", "pa": "ਇਹ ਜਵਾਬ ਹੈ।", "ko": "이것이 답입니다.", "he": "זו התשובה.",
    "kn": "ಇದು ಉತ್ತರ.", "ml": "ഇതാണ് ഉത്തരം.", "ta": "இது பதில்.", "te": "ఇది సమాధానం.", "th": "นี่คือคำตอบ",
    "ja": "これは答えです。漢字もある。", "zh": "这是答案。",
}  # fmt: skip


@pytest.mark.parametrize("language", TEXTS)
def test_languages(language: str) -> None:
    assert languages(TEXTS[language]) == {language}
    assert [other for other in TEXTS if is_written_in(TEXTS[language], other)] == [language]


def test_a_text_without_words_is_in_no_one_language() -> None:
    assert not is_written_in("xyzzy plugh", "en")
    assert not is_written_in("42", "en")
    assert languages("42") == frozenset()


def row(truth: Any = None, **extra_info: Any) -> RewardItem:
    return RewardItem("i", "g", "", "prompt", "*one two*\nthree, four", truth, extra_info)


KIND_LIST = ["punctuation:no_comma", "length_constraints:number_words", "startend:quotation"]
KWARGS = [{"num_words": None}, {"num_words": 2, "relation": "at least"}, None]


@pytest.mark.parametrize(
    "item",
    [
        row(instruction_id_list=KIND_LIST, kwargs=KWARGS),
        row({"instruction_id_list": KIND_LIST, "kwargs": KWARGS}),
        row(json.dumps([{"instruction_id": KIND_LIST, "kwargs": KWARGS}])),
    ],
)
def test_a_row_is_worth_what_it_keeps(item: RewardItem) -> None:
    # Without its last row the response has no comma.
    assert SCORERS["ifeval"](item) == Scored(0.0, {"fraction": pytest.approx(1 / 3), "loose": pytest.approx(2 / 3)})
    assert SCORERS["ifeval_fraction"](item).total == pytest.approx(1 / 3)  # type: ignore[union-attr]
    assert SCORERS["ifeval_fraction"](item).components["all"] == 0.0  # type: ignore[union-attr]


def test_all_kept_is_one() -> None:
    item = row(instruction_id_list=["detectable_format:number_highlighted_sections"], kwargs=[{"num_highlights": 1}])
    assert SCORERS["ifeval"](item) == Scored(1.0, {"fraction": 1.0, "loose": 1.0})


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (row(), "no instructions"),
        (row("{"), "not JSON"),
        (row("7"), "no instructions"),
        (row(instruction_id_list=["shout"]), "'shout' (known: keywords:existence"),
        (row(instruction_id_list=["length_constraints:number_words"]), "missing"),
        (row(instruction_id_list=["startend:quotation"], kwargs=[{"x": 1}]), "unexpected"),
        (row(instruction_id_list=["startend:quotation"], kwargs=[{}, {}]), "as many"),
        (row(instruction_id_list=["startend:quotation"], kwargs=[7]), "no objects"),
        (row(instruction_id_list=["language:response_language"], kwargs=[{"language": "xx"}]), "'xx' is not known"),
        (
            row(
                instruction_id_list=["length_constraints:number_words"],
                kwargs=[{"num_words": 2, "relation": "exactly"}],
            ),
            "not 'exactly'",
        ),
    ],
)
def test_a_row_that_cannot_be_read_has_no_score(item: RewardItem, reason: str) -> None:
    outcome = SCORERS["ifeval"](item)
    assert isinstance(outcome, Unscorable)
    assert reason in outcome.reason


@pytest.mark.parametrize("text", ["<<", "[", "*", "**", "!", "p.", "a ", "Section ", "A-", "x\n\n", "***", "é"])
def test_every_kind_takes_long_texts(text: str) -> None:
    """The time limit of the tests would reveal a quadratic one."""
    for kind, arguments, *_ in CASES:
        is_kept(kind, text * (50_000 // len(text)) + "x", arguments)
