"""Answers as scorers read them, by which majorities are counted: one text for all that a scorer takes for equal."""

# ruff: noqa: RUF001  # marks that look like ASCII ones

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.reward_service.outcomes import RewardItem, Scored, to_proto
from rollmesh.reward_service.scorers import SCORERS

CHOICES = {"choices": ["red", "green", "blue"]}
PATTERN = {"regex": r"total: (?P<answer>\w+)"}
# Scorer, ground truth, responses with the right answer, and groups of responses with one wrong answer each.
SPELLED: list[tuple[str, Any, list[str], list[list[str]]]] = [
    ("arithmetic", "7", ["7", "3+4=7", "07", "7.0", "７"], [["8", "4+4 = 8.00"], ["1,000", "1000"]]),
    ("choice", "B", ["B", "(b)", "Answer: B", "green", "答案：B"],
     [["A", "red", r"\boxed{A}"], ["C.", "C is correct"]]),
    ("exact_match", ["cat", "a cat"], ["cat", " a cat "], [["dog", "dog\n"], ["Cat"]]),
    ("strings", "abc", ["abc", '"abc"'], [["abd", "'abd'"], ["ABC"]]),
    ("gsm8k", "1000", ["#### 1,000", "so 1000", r"\boxed{1000}"], [["#### 7", "it is 7.0", "#### 14/2"], ["8"]]),
    ("gsm8k_strict", "7", ["#### 7", "x\n#### 7"], [["#### 8"], ["#### 8."]]),
    ("gsm8k_flexible", "7", ["7", "so 7"], [["8", "it is 8"], ["9"]]),
    ("math_dapo", "34", ["Answer: 34", r"\boxed{34}", "Answer: $34$"],
     [["Answer: 35", r"\boxed{35}"], ["Answer: 034"]]),
    ("math_string", r"\frac12", [r"\boxed{\frac{1}{2}}", r"\boxed{1/2}"],
     [[r"\boxed{\dfrac13}", r"\boxed{1/3}"], [r"\boxed{2}"]]),
    ("math", r"\frac12", [r"\boxed{0.5}", r"\boxed{\frac{2}{4}}", "the answer is 1/2"],
     [[r"\boxed{\frac13}", r"$\frac{2}{6}$"], [r"\boxed{x^2+2x+1}", r"\boxed{(x+1)^2}"], [r"\boxed{x=5}", r"\boxed{5}"],
      [r"\boxed{\{1,2\}}", r"\boxed{2,1}"], [r"\boxed{(1,3)}", r"\boxed{(1,\sqrt{9})}"], [r"\boxed{2x}"]]),
    ("qa", ["Paris", "City of Light"], ["<answer>the Paris!</answer>", "<answer>city of light</answer>"],
     [["<answer>Rome</answer>", "<answer>rome.</answer>"], ["<answer>Bonn</answer>"]]),
    ("regex", "42", ["total: 42"], [["total: 41", "my total: 41"], ["total: x"]]),
    ("json_schema", {"type": "object"}, ['{"a": 1, "b": 2}', '```json\n{"b": 2, "a": 1}\n```'],
     [["[1]", "[ 1 ]"], ["2"]]),
]  # fmt: skip
# Responses in which a scorer finds no answer, and scorers that read none.
SILENT = {
    "gsm8k_strict": "7", "math_dapo": "7", "math_string": "7", "qa": "Paris", "choice": "so what", "arithmetic": "x",
    "math": "no idea", "gsm8k": "no idea", "regex": "42", "json_schema": "{",
}  # fmt: skip
INFO = {"choice": CHOICES, "regex": PATTERN}


def answer_of(name: str, response: str, truth: Any) -> tuple[float, str | None]:
    found = SCORERS[name](RewardItem("i", "g", "", "", response, truth, INFO.get(name, {})))
    assert isinstance(found, Scored), found
    return found.total, found.answer


@pytest.mark.parametrize(("name", "truth", "right", "wrong"), SPELLED)
def test_equal_answers_are_one_text_and_others_are_others(
    name: str, truth: Any, right: list[str], wrong: list[list[str]]
) -> None:
    rewards, answers = zip(*(answer_of(name, response, truth) for response in right), strict=True)
    assert set(rewards) == {1.0}
    assert len(set(answers)) == 1, answers
    groups = [{answer_of(name, response, truth)[1] for response in group} for group in wrong]
    assert all(len(group) == 1 for group in groups), groups
    assert len(set().union(*groups, answers)) == len(groups) + 1
    assert None not in set().union(*groups, answers)
    assert "" not in set().union(*groups, answers)


@pytest.mark.parametrize("name", SILENT)
def test_a_response_without_an_answer_has_an_empty_one(name: str) -> None:
    truth = next(truth for scorer, truth, _, _ in SPELLED if scorer == name)
    assert answer_of(name, SILENT[name], truth)[1] == ""


def test_scorers_that_judge_all_of_a_response_read_no_answer() -> None:
    assert answer_of("none", "x", None)[1] is None
    found = SCORERS["regex"](RewardItem("i", "g", "", "", "x 7", r"\d"))
    assert isinstance(found, Scored)
    assert found.answer is None


def test_a_long_answer_is_short_and_its_own() -> None:
    one, other, same = ("x" * 5000 + end for end in ("a", "b", "a"))
    answers = [Scored(0.0, answer=text).answer or "" for text in (one, other, same, "\ud800\x1b")]
    assert answers[0] == answers[2] != answers[1]
    assert max(map(len, answers)) <= 120
    assert to_proto("i", Scored(0.0, answer=answers[3])).scored.HasField("answer")
    assert not to_proto("i", Scored(0.0)).scored.HasField("answer")
