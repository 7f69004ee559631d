"""Scorers for mathematics and questions: what counts as an answer, and what counts as equal."""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.outcomes import RewardItem, Scored
from rollmesh.reward_service.scorers import LINEAR, SCORERS, gsm8k_text, prepare, qa
from rollmesh.reward_service.scorers.boxes import last_boxed
from rollmesh.reward_service.scorers.mathematics import math_dapo, math_value, self_test


def outcome(name: str, response: str, truth: Any, source: str = "") -> Any:
    return SCORERS[name](RewardItem("i", "g", source, "prompt", response, truth))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}} and \boxed{\{3\}}", r"\{3\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed 7$ or so", "7"),
        (r"\boxed{7", None),
        ("boxed{7}", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


# Answers that a reader takes for equal, and for different.
EQUAL = [
    (r"\boxed{13\,500}", "13500"), (r"\boxed{1 234 567}", "1234567"), ("13500", r"13\,500"),
    (r"\boxed{3.0 \times 10^8}", "3e8"), (r"\boxed{1.5e-3}", "0.0015"), (r"\boxed{\varnothing}", r"\emptyset"),
    (r"\boxed{\text{no solution}}", r"\emptyset"), ("\\boxed{42元}", "42"), (r"\boxed{42}", "42个"),
    ("答案：42", "42"), ("所以答案是-42。", "-42"), ("\\boxed{４２}", "42"), ("\\boxed{−5}", "-5"),
    (r"\boxed{0 < x < 12.5}", "(0, 12.5)"), (r"\boxed{x \ge 1}", r"[1, \infty)"), (r"\boxed{(2,\infty)}", "x > 2"),
    (r"\boxed{(-\infty, 1) \cup (2, \infty)}", r"x<1 \text{ or } x>2"),
    (r"\boxed{\frac{1}{\sqrt{n}}}", r"\sqrt{1/n}"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", "(1,2)"), (r"\boxed{\sin 30^\circ}", r"\frac12"),
    (r"\boxed{1, 2, \ldots, n}", r"1,2,\ldots,n"), (r"\boxed{\frac{10}{2} = 5}", "5"),
    (r"\boxed{10^{-20}}", r"10^{-20}"),
    (r"First \boxed{1}, then \boxed{2}", "2"), (r"\boxed{1} and \boxed{2}", "1, 2"),
    (r"<think>\boxed{5}</think> So it is.", "5"), (r"\boxed{1/3}", "0.333333"),
]  # fmt: skip
DIFFERENT = [
    (r"\boxed{10^{-20}}", "10^{-21}"), (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}"), (r"\boxed{0}", "10^{-12}"),
    (r"\boxed{6.6\times 10^{-34}}", r"1.6\times 10^{-19}"), (r"\boxed{(10^{-21}, 1)}", "(10^{-20}, 1)"),
    (r"\boxed{0.3333333}", r"\frac13"), (r"\boxed{3.14159265}", r"\pi"), (r"\boxed{5=6}", "6"),
    (r"\boxed{x=5=6}", "6"),
    (r"\boxed{1,2,2}", "1,2"), (r"\boxed{10_2}", "10_3"), (r"\boxed{1,3,\ldots,n}", r"1,2,\ldots,n"),
    (r"\boxed{x \ge 1}", r"(1, \infty)"), (r"\boxed{x>1, x<2}", r"\mathbb{R}"),
    (r"\boxed{\sqrt{x^2}}", "x"), (r"First \boxed{2}, then \boxed{1}", "2"),
]  # fmt: skip
NUMBERS = [
    ("#### 1 000", "1000"), ("#### −5", "-5"), ("#### 3/4", "0.75"), ("#### 2 * 21 = 42", "42"),
    ("#### 42 = 2*21", "42"),
    ("#### 1.5e3", "1500"), ("#### ４２", "42"), ("#### ٤٢", "42"), ("#### 1,00,000", "100000"), ("#### 50%", "50"),
    ("#### 42\n#### Notes", "42"), ("#### x = 5", "5"),
    ("The answer is −5, or so.", "-5"), ("#### 3 1/2", "3.5"), ("The range is 10-12", "12"), ("It is -5.", "-5"),
    (r"\boxed{42}. I used 3 steps.", "42"), (r"\boxed{1{,}000}", "1000"),
    ("The answer is 42. It took 3 steps.", "42"),
    ("答案是42，用3步", "42"),
    ("<think>#### 42</think> That is all.", "42"), ("The answer is that each of the 3 gets 42", "42"),
    ("The answer is 42, not 6*8=48.", "42"), ("#### Total = 6 * 7 = 42", "42"),
    ("The answer is about $42, or 40", "42"),
    ("#### -$42", "-42"), ("The balance is -$1,000", "-1000"), (r"#### 2\frac{1}{2}", "2.5"), ("#### ½", "0.5"),
    ("#### 3¾ cups", "3.75"), (r"#### 1.5 \times 10^{3}", "1500"), ("#### 2 × 10^-2", "0.02"), ("#### 10^3", "1000"),
    ("#### 5 * 10^2 = 500", "500"), ("#### 1'234", "1234"), ("Die Antwort ist 3,5", "3.5"),
    ("La respuesta es 1.234,5", "1234.5"), ("#### 1.234.567,891", "1234567.891"), ("#### 3, 5", "3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "response", "truth", "total"),
    [
        ("gsm8k_strict", "#### 1,234", "1234", 1.0),
        ("gsm8k_strict", "it is 1234", "1234", 0.0),
        ("gsm8k_strict", "#### 5\n#### 6", "6", 1.0),
        ("gsm8k_strict", "#### 6 " + "x" * 300, "6", 0.0),
        ("gsm8k_flexible", "it is 1234", "1234", 1.0),
        ("gsm8k_flexible", "so 12, or 13 .", "13", 1.0),
        ("math_string", r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
        ("math_string", r"\boxed{1/2}", r"\boxed{\frac{1}{2}}", 1.0),
        ("math_string", r"\boxed{x = 5\text{ cm}}", "5", 1.0),
        ("math_string", r"\boxed{0.75}", r"\frac{3}{4}", 0.0),
        ("math_string", "7", "7", 0.0),
        ("math_dapo", "Answer: 034 \nThat is it.", "34", -1.0),
        ("math_dapo", "Answer: $1,034$", "1034", 1.0),
        ("math_dapo", "Answer: 6\nAnswer: 7", "7", 1.0),
        ("math_dapo", r"\boxed{34}", "34", 1.0),
        ("math_dapo", r"\boxed{34}" + "x" * 100, "34", -1.0),
        ("math_dapo", "", "34", -1.0),
        ("math_dapo", r"\boxed 34", "34", -1.0),
        ("math_dapo", r"\boxed{34} and \boxed 35", "34", 1.0),
        ("math_dapo", r"Answer: \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        ("math_dapo", r"Answer: $\boxed{\text{(C)}}$", "(C)", 1.0),
        ("math_dapo", "Answer: 5 ft", "5", -1.0),
        ("math_dapo", "Answer: 5 feet", "5", 1.0),
        ("math", r"\boxed{0.75}", r"\frac{3}{4}", 1.0),
        ("math", r"so $x^2+2x+1$", "(x+1)^2", 1.0),
        ("math", r"\boxed{1,2,3}", "3,2,1", 1.0),
        ("math", r"\boxed{(1,2]}", r"\boxed{[1,2)}", 0.0),
        ("math", "no idea", "5", 0.0),
        *(("math", response, truth, 1.0) for response, truth in EQUAL),
        *(("math", response, truth, 0.0) for response, truth in DIFFERENT),
        *(("gsm8k", response, truth, 1.0) for response, truth in NUMBERS),
        ("gsm8k", "#### 1,5", "15", 0.0),
        ("gsm8k", "#### 10-12", "-12", 0.0),
        ("gsm8k", "#### -$42", "42", 0.0),
        ("gsm8k", r"#### 2\frac{1}{2}", "10.5", 0.0),
        ("gsm8k", "#### 3,5", "3", 0.0),
        ("math", r"\boxed{12}", r"\textbf{(C)}\ 12", 1.0),
        ("math", r"\boxed{\textbf{(C) }\frac{1}{2}}", "0.5", 1.0),
        ("math", r"\boxed{13}", r"\mathrm{(B)} \quad 12", 0.0),
        ("qa", "<answer>The Eiffel tower!</answer>", ["Louvre", "Eiffel Tower"], 1.0),
        ("qa", "<answer>Louvre</answer> or <answer>Paris</answer>", "Louvre", 0.0),
        ("qa", "Louvre", "Louvre", 0.0),
        ("qa", "<answer>Louvre</answer>", {"target": ["Museum", "Louvre"]}, 1.0),
        ("qa", "<answer>Paris</answer>", {"target": ["Museum", "Louvre"]}, 0.0),
        ("qa", "<answer>a <answer>Louvre</answer>", "answerlouvre", 1.0),
        ("qa", "</answer><answer>Louvre</answer><answer>Paris", "Louvre", 1.0),
    ],
)
def test_totals(name: str, response: str, truth: Any, total: float) -> None:
    result = outcome(name, response, truth)
    assert isinstance(result, Scored)
    assert result.total == total


def test_a_truth_that_is_no_mathematics_is_unscorable() -> None:
    assert "cannot be read as mathematics" in outcome("math", r"\boxed{7}", r"\text{}").reason


@pytest.mark.parametrize(("response", "readable", "boxed"), [(r"\boxed{}", 0, 1), ("", 0, 0), (r"\boxed{7}", 1, 1)])
def test_components_tell_wrong_from_unreadable(response: str, readable: float, boxed: float) -> None:
    assert outcome("math", response, "8").components == {"format": boxed, "readable": readable}


def test_a_box_that_is_not_closed_ends_with_its_line_unless_the_response_was_cut_off() -> None:
    def total(response: str, finish_reason: str) -> float:
        found = SCORERS["math"](RewardItem("i", "g", "", "p", response, "5/2", finish_reason=finish_reason))
        assert isinstance(found, Scored)
        return found.total

    for response in (r"\boxed{5/2", r"so $\boxed{\frac{5}{2}$." "\nThat is all.", r"\boxed{1} then \boxed{\frac{5}{2"):
        assert total(response, "stop") == total(response, "") == 1.0
        assert total(response, "length") == 0.0


def test_values_are_compared_outside_the_main_thread() -> None:
    # Time limits by signals would fail here.
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(outcome("math", r"\boxed{2\sqrt{3}}", r"\sqrt{12}")))
    worker.start()
    worker.join()
    assert found[0].total == 1.0


def test_format_scores() -> None:
    assert gsm8k_text.grade("#### 5", "6", format_score=0.1) == 0.1
    assert gsm8k_text.grade("5", "6", format_score=0.1) == 0.0
    assert qa.grade("<answer>x</answer>", ["y"], format_score=0.2) == 0.2
    assert qa.grade("<answer>y</answer>" * 11, ["y"]) == 0.25
    assert qa.grade("<answer>in Paris</answer>", ["Paris"], match="contains") == 1.0


HOSTILE = [text * (1_000_000 // len(text)) for text in (
    "<answer>", "</answer>", "<answer>a", r"\boxed{", r"\boxed", "{", "1,", "1,111", "9", "#### -", "Answer: ",
    r"\frac", r"\text{ ", r"\sqrt", "$", "=", " the", "'", "-.", "\u00e9 ",
)]  # fmt: skip


@pytest.mark.parametrize("name", sorted(LINEAR))
def test_a_linear_scorer_takes_a_million_characters_of_anything(name: str) -> None:
    """The time limit of the tests would reveal a quadratic one."""
    for text in HOSTILE:
        for truth in ("42", ["42", text]):
            assert outcome(name, text, truth) is not None


def test_shared_words() -> None:
    assert qa.overlap("Paris, France", "Paris") == pytest.approx((2 / 3, 0.5, 1.0))
    assert qa.overlap("yes or no", "no") == (0.0, 0.0, 0.0)
    assert qa.overlap(None, "no") == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("source", "response", "truth"),
    [
        ("math_dapo", "Answer: 7", "7"),
        ("aime2025", "Answer: 7", "7"),
        ("HuggingFaceH4/MATH-500", r"\boxed{0.5}", r"\frac12"),
        ("numina_olympiads", r"\boxed{0.5}", r"\frac12"),
        ("searchR1_nq", "<answer>x</answer>", ["x"]),
    ],
)
def test_auto_knows_the_usual_sources(source: str, response: str, truth: Any) -> None:
    assert outcome("auto", response, truth, source).total == 1.0


@settings(max_examples=50)
@given(response=st.text(alphabet="\\boxed{}frac12 Answer:#<>/$.,=", max_size=40), truth=st.from_regex("[a-z0-9]{1,10}"))
def test_any_text_gets_a_score(response: str, truth: str) -> None:
    for name in ("math_string", "qa"):
        assert outcome(name, response, f"x{truth}").total in (0.0, 1.0)
    for name in ("gsm8k_strict", "gsm8k_flexible", "gsm8k"):
        assert outcome(name, response, "12").total in (0.0, 1.0)
    assert outcome("math_dapo", response, truth).total in (-1.0, 1.0)
    assert math_dapo.grade(response, truth, strict_box=True).total in (-1.0, 1.0)


def test_the_grader_is_the_one_that_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another antlr runtime the grammar reads no percent: nothing is scored, and the error says with what."""
    self_test.check_versions()
    self_test.run()
    installed = {**self_test.packages(), "antlr4-python3-runtime": "4.9.3"}
    monkeypatch.setattr(self_test, "installed_version", installed.__getitem__)
    with pytest.raises(RewardError, match=r"antlr4-python3-runtime 4\.9\.3 \(tested: 4\.13\.2\)"):
        self_test.check_versions()
    no_percent = math_value.Grade(correct=False, readable=False, answer="")
    monkeypatch.setattr(math_value, "grade", lambda response, truth: no_percent)
    with pytest.raises(RewardError, match=r"for different, .*math-verify 0\.8\.0, .*antlr4-python3-runtime 4\.9\.3"):
        prepare("math", tested=False)
    prepare("math", tested=True)


def test_a_formula_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from math_verify import parser

    read: list[str] = []
    latex2sympy = parser.latex2sympy

    def counted(latex: str, **options: Any) -> Any:
        read.append(latex)
        return latex2sympy(latex, **options)

    monkeypatch.setattr(parser, "latex2sympy", counted)
    for attempt in range(2):
        for number in range(1000, 1050):
            response, truth = rf"Attempt {attempt}: \boxed{{\frac{{{number}}}{{7}}}}", rf"\frac{{{number}}}{{7}}"
            assert outcome("math", response, truth).total == 1.0
    assert len(read) == len(set(read)) == 50
    long = "+".join(["1"] * 200)
    for _ in range(2):
        assert outcome("math", rf"\boxed{{{long}}}", "200").total == 1.0
    assert sum(len(latex) > 256 for latex in read) == 2
