"""Scorers of form: patterns, choices, and JSON under a schema."""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.mesh.config.scorers.parts import part_names
from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.loading import load_function
from rollmesh.reward_service.outcomes import RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers import SCORERS, prepare
from rollmesh.reward_service.scorers.forms import regex
from rollmesh.reward_service.scorers.forms.json_answer import NoJsonError, answer_text, read


def item(response: str, truth: Any = None, **extra_info: Any) -> RewardItem:
    return RewardItem("i", "g", "", "prompt", response, truth, extra_info)


def total(name: str, response: str, truth: Any = None, **extra_info: Any) -> float:
    outcome = SCORERS[name](item(response, truth, **extra_info))
    assert isinstance(outcome, Scored), outcome
    return outcome.total


def reason(name: str, response: str, truth: Any = None, **extra_info: Any) -> str:
    outcome = SCORERS[name](item(response, truth, **extra_info))
    assert isinstance(outcome, Unscorable), outcome
    return outcome.reason


class TestRegex:
    def test_a_pattern_is_found_or_not(self) -> None:
        assert total("regex", "abc 42", r"\d{2}") == 1.0
        assert total("regex", "abc 4", r"\d{2}") == 0.0
        assert total("regex", "ABC", regex="(?i)abc") == 1.0

    def test_a_group_is_compared_with_the_truth(self) -> None:
        pattern = r"Answer: (?P<answer>\w+)"
        assert total("regex", "Answer: 41\nAnswer: 42", "42", regex=pattern) == 1.0
        assert total("regex", "Answer: 42\nAnswer: 41", "42", regex=pattern) == 0.0
        assert total("regex", "Answer: b", ["a", "b"], regex=pattern) == 1.0
        assert SCORERS["regex"](item("no", "42", regex=pattern)) == Scored(0.0, {"format": 0.0})

    def test_a_row_without_a_usable_pattern_has_no_score(self) -> None:
        assert "no pattern" in reason("regex", "x")
        assert "cannot be read" in reason("regex", "x", "(")
        assert "4096 are allowed" in reason("regex", "x", "x" * 5000)
        assert "no ground truth" in reason("regex", "x", regex="(?P<answer>.)")

    def test_a_longer_response_does_not_match(self) -> None:
        assert total("regex", "x" * (regex.LONGEST + 1), "x") == 0.0

    def test_the_pattern_may_stand_in_the_name(self) -> None:
        function = load_function(r"regex:^\w+:\d$")
        assert function.name == "regex"
        assert function.score([item("a:1")]) == [Scored(1.0, {"format": 1.0})]
        assert part_names(["regex:a", "regex:b:c"]) == ["regex:a#0", "regex:b:c#1"]
        with pytest.raises(RewardError, match="cannot be read"):
            load_function("regex:(")


CITIES = ["Rome", "Paris", "New York", "The Hague"]
LETTERED = [
    ("B", 1), ("(B)", 1), ("b", 1), ("B.", 1), ("B) Paris", 1), ("**B**", 1), ("Paris", 1), ("paris.", 1),
    ("B. Rome", 0), ("A", 0), ("", 0), ("I do not know", 0), ("A, B", 0), ("A or B", 0), ("B and C are wrong", 0),
    ("It is in France.\nThe answer is B.", 1), ("The answer is (B), as it is in France.", 1),
    ("The correct answer is: **B**", 1), ("Answer: B", 1), ("answer: b", 1), ("#### B", 1),
    ("Final answer: Paris", 1),
    ("The best option is B because it is in France.", 1), ("the answer is option B", 1),
    ("The answer is B. No: the answer is C.", 0), ("The answer is C.\nSo the final answer is B", 1),
    ("The answer is A dog", 0), ("The answer is B or C", 0), ("The answer is not B", 0),
    (r"so \boxed{B}", 1), (r"\boxed{\text{(B)}}", 1), (r"\boxed{A} or \boxed{B}", 1), (r"Answer: B \boxed{}", 0),
    ("<answer> B </answer>", 1), ("<answer>Paris</answer> Answer: A", 1), ("<answer>B, C</answer>", 0),
    ("B. Because it is in France.\n\nThe rest is text", 1), ("Answers may differ: B", 0), ("Option B", 1),
    ("(B) (A) (C) (D)", 0),
    ("Answer: B. A. C. D.", 0),
    ("B A C D", 0),
    ("The answer is B. A city in France.", 1),
    ("I pick B", 1),
    ("C is wrong, A is too", 0), ("The answer is A because of this", 0),
]  # fmt: skip
# A reader's judgement of answers in other words and languages; the right one is B.
SAID = [
    "B is correct.", "Option B is correct", "(B) is right.", "B is the correct answer.", "Only B is true.", "So B.",
    "Therefore, (B).", "Thus the best choice would be B.", "It's B.", "I'd go with B.", "My answer: B", "Answer: {B}",
    r"Answer: \(B\)", r"Answer: $\textbf{(B)}$", "Answer: <B>", "Answer: I think it is B", "Answer:\n**B. Paris**",
    "The answer is not A, it is B.", "The answer isn't A; it's B.", "The answer is Paris, not Rome.",
    "The answer is Paris because of the tower", r"The sum is \boxed{42}." "\nAnswer: B",
    r"\boxed{B} and not \boxed{}",
    "<answer>42</answer> Answer: B", "<think>\\boxed{A}</think> The answer is B", "Answer：B",
    "答案：B", "答案是（B）", "答案为Ｂ。", "所以选B。",
    "故选：B", "答：B", "A fails, and C fails, B must be correct.", "正确答案是 **B**", "B选项正确",
    "答えはBです。", "正解：B", "정답은 B입니다.",
    "La respuesta correcta es la B.", "Respuesta: B", "La bonne réponse est la B", "Réponse : B",
    "Die Antwort lautet: B", "A resposta correta é a letra B.", "Risposta: B", "Het antwoord is B",
    "Ответ: B", "Правильный ответ — B", "Odpowiedź: B", "Cevap: B", "Jawaban: B",
    "Đáp án là B", "الإجابة الصحيحة هي B", "उत्तर: B", "คำตอบคือ B",
]  # fmt: skip
NOT_SAID = [
    "B is incorrect", "B is not correct", "Neither A nor B is correct.", "A and B is correct",
    "If B is correct, then C",
    "I would not pick B", "I never choose B", "The wrong answer is B", "The answer isn't B.", r"\boxed{A, B}",
    "<answer>A or B</answer> Answer: B", "Answer: B and C", "A oder B", "答案不是B", "不选B",
    "答案：A和B", "La respuesta no es B", "Berlin", "Answer: Berlin",
]  # fmt: skip


class TestChoice:
    @pytest.mark.parametrize(("response", "expected"), LETTERED)
    def test_usual_answers(self, response: str, expected: float) -> None:
        assert total("choice", response, "B", choices=CITIES) == expected

    @pytest.mark.parametrize("response", SAID)
    def test_answers_in_other_words_and_languages(self, response: str) -> None:
        assert total("choice", response, "B", choices=CITIES) == 1.0

    def test_labels_of_other_scripts(self) -> None:
        assert total("choice", "Ответ: Б", "Б", choices={"А": "да", "Б": "нет"}) == 1.0
        assert total("choice", "答案：乙", "乙", choices={"甲": "红", "乙": "绿"}) == 1.0
        assert total("choice", "الإجابة: ب", "ب", choices={"أ": "x", "ب": "y"}) == 1.0

    @pytest.mark.parametrize("response", NOT_SAID)
    def test_what_denies_an_answer_or_names_two(self, response: str) -> None:
        assert total("choice", response, "B", choices=CITIES) == 0.0

    @pytest.mark.parametrize("truth", ["B", "b", "(B)", 1, "1", "Paris", " paris "])
    def test_a_truth_is_a_label_a_place_or_a_text(self, truth: Any) -> None:
        assert total("choice", "The answer is B", truth, choices=CITIES) == 1.0
        assert total("choice", "The answer is C", truth, choices=CITIES) == 0.0

    def test_choices_come_in_several_forms(self) -> None:
        assert total("choice", "2", "2", choices={"label": ["1", "2"], "text": ["x", "y"]}) == 1.0
        assert total("choice", "Answer: y", "2", options={"1": "x", "2": "y"}) == 1.0
        assert total("choice", "Answer: y", 1, options=["x", "y"]) == 1.0
        assert total("choice", "Answer: 4", 1, choices=["2", "4", "1"]) == 1.0, "a number is a place, a text a text"
        assert total("choice", "(D)", "D") == 1.0
        assert total("choice", "yes", "yes", choices=["yes", "no"]) == 1.0
        roman = {"I": "red", "II": "green", "III": "blue", "IV": "grey"}
        for response in ("II", "Answer: II", r"\boxed{II}", "The answer is (II).", "II. green", "I choose II"):
            assert total("choice", response, "II", choices=roman) == 1.0
            assert total("choice", response, "I", choices=roman) == 0.0
        assert total("choice", "Answer: I", "I", choices=roman) == 1.0
        assert total("choice", "Answer: II or III", "II", choices=roman) == 0.0
        assert total("choice", "The answer is (1b)", "1B", choices={"1a": "x", "1b": "y"}) == 1.0

    def test_without_a_usable_row_there_is_no_score(self) -> None:
        assert "none of the choices A, B" in reason("choice", "A", "C", choices=["x", "y"])
        assert "none of the choices" in reason("choice", "A", None)
        assert "expected a list" in reason("choice", "A", "A", choices=7)
        assert "2 labels for 1 texts" in reason("choice", "A", "A", choices={"label": ["A", "B"], "text": ["x"]})

    def test_found_is_told_from_right(self) -> None:
        assert SCORERS["choice"](item("Answer: A", "B")) == Scored(0.0, {"format": 1.0})
        assert SCORERS["choice"](item("so what", "B")) == Scored(0.0, {"format": 0.0})

    @pytest.mark.parametrize(
        "text", ["answer is ", "####", "<answer>", r"\boxed{", "\\text{", "A", "\t", "*", "(", " or "]
    )
    def test_a_million_characters_take_no_time(self, text: str) -> None:
        total("choice", text * (1_000_000 // len(text)), "B", choices=CITIES)

    @settings(max_examples=30)
    @given(st.text(alphabet="ABab()*. \nanswer:is#\\boxed{}<>/", max_size=60))
    def test_any_text_gets_a_score(self, response: str) -> None:
        assert total("choice", response, "B", choices=CITIES) in (0.0, 1.0)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "mail": {"type": "string"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class TestJson:
    def test_the_last_block_marked_json_counts(self) -> None:
        assert answer_text("a\n```json\n1\n```\nb\n```json\n2\n```\n```python\n3\n```\nc") == "\n2\n"
        assert answer_text("```\n1\n```") == "\n1\n"
        assert answer_text("```json\n1") == "```json\n1"
        assert answer_text("7") == "7"

    @pytest.mark.parametrize(
        "text", ["", "{", "NaN", "-Infinity", "1e999", "9" * 200, "[" * 5000, "[" * 200 + "]" * 200]
    )
    def test_what_is_no_json(self, text: str) -> None:
        with pytest.raises(NoJsonError):
            read(text)

    @pytest.mark.parametrize(
        ("response", "whole", "share"),
        [
            ('{"name": "Ada", "age": 36}', 1.0, 1.0),
            ('So:\n```json\n{"name": "Ada", "age": 36}\n```\nDone.', 1.0, 1.0),
            ('{"name": "Ada"}', 0.0, 2 / 3),
            ('{"name": 1, "age": -1}', 0.0, 1 / 3),
            ('{"name": "Ada", "age": 36, "mail": 1}', 0.0, 3 / 4),
            ('{"name": "Ada", "age": 36, "more": 1}', 0.0, 2 / 3),
            ("[]", 0.0, 0.0),
            ("so what", 0.0, 0.0),
        ],
    )
    def test_a_schema_is_kept_or_in_part(self, response: str, whole: float, share: float) -> None:
        for place in ({"truth": PERSON}, {"truth": json.dumps(PERSON)}, {"json_schema": PERSON}):
            assert total("json_schema", response, **place) == whole
            assert total("json_schema_fraction", response, **place) == pytest.approx(share)

    def test_components_tell_what_was_wrong(self) -> None:
        assert SCORERS["json_schema"](item("{", PERSON)) == Scored(0.0, {"format": 0.0, "fraction": 0.0})
        assert SCORERS["json_schema_fraction"](item('{"name": "A", "age": 1}', PERSON)).components == {
            "format": 1.0,
            "all": 1.0,
        }

    def test_a_row_without_a_usable_schema_has_no_score(self) -> None:
        assert "no schema" in reason("json_schema", "{}")
        assert "not JSON" in reason("json_schema", "{}", "{")
        assert "no object" in reason("json_schema", "{}", "[1]")
        assert "no schema" in reason("json_schema", "{}", {"type": "thing"})
        assert "not a 'regex'" in reason("json_schema", '"a"', {"pattern": "("})

    def test_references_stay_inside(self) -> None:
        inside = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
        assert total("json_schema", "7", inside) == 1.0
        assert total("json_schema", "true", inside) == 0.0
        # A file that exists: it would be read by the library's own default.
        outside = {"$ref": Path(__file__).as_uri()}
        assert "does not contain" in reason("json_schema", "7", outside)

    def test_the_schema_may_be_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "person.json"
        path.write_text(json.dumps(PERSON))
        prepare(f"json_schema:{path}", tested=False)
        function = load_function(f"json_schema_fraction:{path}")
        assert function.name == "json_schema_fraction"
        assert function.score([item('{"name": "Ada"}')])[0].total == pytest.approx(2 / 3)  # type: ignore[union-attr]
        for broken in ("{", '{"type": "thing"}'):
            path.write_text(broken)
            with pytest.raises(RewardError, match=r"person\.json"):
                load_function(f"json_schema:{path}")
        with pytest.raises(RewardError, match="absent"):
            load_function("json_schema:absent")
