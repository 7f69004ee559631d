"""Ground truths: each form is read as its scorer means it, and all else is unscorable, with a remedy that helps."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from rollmesh.reward_service.outcomes import RewardItem, Scored, Unscorable
from rollmesh.reward_service.row_faults import fault_of
from rollmesh.reward_service.scorers import SCORERS
from rollmesh.reward_service.scorers.truths import TruthError, one_number, one_text, texts

# Scorers of one answer, with a response whose answer is the text.
ONE = {
    "math": r"\boxed{%s}",
    "math_dapo": "Answer: %s",
    "math_string": r"\boxed{%s}",
    "gsm8k": "#### %s",
    "gsm8k_strict": "#### %s",
    "gsm8k_flexible": "it is %s",
    "arithmetic": "%s",
}
SEVERAL = {"exact_match": "%s", "strings": '"%s"', "qa": "<answer>%s</answer>"}
ALL = ONE | SEVERAL


def outcome(name: str, response: str, truth: Any, **extra_info: Any) -> Any:
    return SCORERS[name](RewardItem("i", "g", "", "prompt", response, truth, extra_info))


def judged(name: str, answer: str, truth: Any) -> float | None:
    """1 for right, 0 for wrong, None for unscorable; the same is told without a response."""
    found = outcome(name, ALL[name] % answer, truth)
    reason = fault_of(name, RewardItem("i", "g", "", "", "", truth))
    if isinstance(found, Unscorable):
        assert found.reason == reason
        return None
    assert not reason
    return float(found.total > 0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("truth", ["34", 34, 34.0, "34 ", "34\n", ["34"], [34], [34.0], ("34",)])
def test_one_answer_in_any_dress_is_that_answer(name: str, truth: Any) -> None:
    assert judged(name, "34", truth) == 1.0
    assert judged(name, "35", truth) == 0.0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "truth",
    [None, "", " \n", [], [""], [None], ["34", None], [[]], {}, {"answer": "34"}, True, False, float("nan"),
     float("inf"), [["34"], ["35"]], [True], [{"answer": "34"}]],
)  # fmt: skip
def test_what_no_scorer_means_is_unscorable(name: str, truth: Any) -> None:
    assert judged(name, "34", truth) is None


@pytest.mark.parametrize("name", ALL)
def test_a_list_of_several_is_alternatives_or_unscorable(name: str) -> None:
    wanted = None if name in ONE else 1.0
    for truth in (["33", "34"], [33, 34], ["34", 33.0]):
        assert judged(name, "34", truth) == wanted
        assert judged(name, "35", truth) == (None if name in ONE else 0.0)


@pytest.mark.parametrize("name", ALL)
def test_json_of_texts_is_read_where_it_can_mean_nothing_else(name: str) -> None:
    literal = name in ("exact_match", "strings")
    assert judged(name, "34", '["34"]') == (None if literal else 1.0)
    assert judged(name, "34", '["33", "34"]') == (1.0 if name == "qa" else None)
    if literal:
        # Both remedies of the message.
        assert judged(name, "34", json.loads('["34"]')) == 1.0
        assert judged(name, '["34"]', ['["34"]']) == 1.0


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("truth", ['{"answer": "34"}', "null", "nan", "[]", "{}"])
def test_what_a_serializer_leaves_is_no_answer(name: str, truth: str) -> None:
    assert judged(name, "34", truth) is None


def test_numbers_are_written_plainly() -> None:
    assert [one_text(value) for value in (34.0, 0.5, 1e22, -3, 1e-7)] == [
        "34", "0.5", "10000000000000000000000", "-3", "0.0000001",
    ]  # fmt: skip
    assert texts(34.0) == ["34", "34.0"]
    assert judged("exact_match", "34.0", 34.0) == judged("exact_match", "34", 34.0) == 1.0
    assert one_number("1,234.50") == Fraction(2469, 2)
    for text in ("1,2", "12,34", "1_000", "Infinity", "9" * 1001, "1/0"):
        with pytest.raises(TruthError, match="not a number"):
            one_number(text)


def test_texts_that_are_mathematics_are_no_lists() -> None:
    assert judged("math", "[0,1]", "[0,1]") == 1.0
    assert judged("math_string", "[0,1]", "[0,1]") == 1.0
    assert judged("math", r"\{1,2\}", r"\{2,1\}") == 1.0


@pytest.mark.parametrize("truth", [r"\boxed{34}", "$34$", r"so it is $\boxed{34}$."])
@pytest.mark.parametrize("name", ["math", "math_dapo", "math_string"])
def test_a_truth_may_be_boxed(name: str, truth: str) -> None:
    assert judged(name, "34", truth) == 1.0


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_strict", "gsm8k_flexible"])
def test_a_solution_is_read_after_its_mark(name: str) -> None:
    assert judged(name, "34", "30 + 4 = 34\n#### 34") == 1.0
    assert judged(name, "34", "thirty-four") is None


def test_what_the_rule_of_a_peer_can_never_meet_is_unscorable() -> None:
    assert judged("gsm8k_strict", "1,234", "1,234") == 1.0
    assert judged("gsm8k_flexible", "1,234", "1,234") == 1.0
    for name in ("gsm8k_strict", "gsm8k_flexible"):
        assert judged(name, "3/4", "3/4") is None
        assert judged(name, "5", "$5") is None


def test_qa_reads_the_object_of_its_dataset() -> None:
    for truth in ({"target": ["Louvre", "Museum"]}, {"target": "Louvre"}, '{"target": ["Louvre"]}'):
        assert judged("qa", "the Louvre", truth) == 1.0
    for truth in (
        {"target": []},
        {"target": None},
        {"answer": "Louvre"},
        '{"answer": "Louvre"}',
        "the",
        "A!",
        ["...", "an"],
    ):
        assert judged("qa", "", truth) is None, truth
    assert judged("qa", "", ["the", "Louvre"]) == 0.0, "an answer without words equals no article"


@pytest.mark.parametrize("truth", [1, 1.0, "1", "B", "b)", ["B"], "B. green", "(B) green", "green", " B \n"])
def test_choice_reads_labels_places_and_texts(truth: Any) -> None:
    choices = ["red", "green"]
    assert outcome("choice", "Answer: B", truth, choices=choices).total == 1.0
    assert outcome("choice", "Answer: A", truth, choices=choices).total == 0.0


@pytest.mark.parametrize("truth", [1.5, True, ["A", "B"], "C", "B. red", "A or B", "", {"label": "B"}, 7, None])
def test_choice_refuses_what_is_none_of_the_choices(truth: Any) -> None:
    assert "none of the choices A, B" in outcome("choice", "Answer: B", truth, choices=["red", "green"]).reason


def test_nulls_of_a_table_are_no_choices() -> None:
    found = outcome("choice", "Answer: C", "B", choices={"A": "red", "B": "green", "C": None})
    assert found == Scored(0.0, {"format": 0.0})


@pytest.mark.parametrize("truth", [5, [r"\d"], {"pattern": "x"}, "", "(", None])
def test_regex_refuses_what_is_no_pattern(truth: Any) -> None:
    assert isinstance(outcome("regex", "5", truth), Unscorable)
    assert fault_of("regex", RewardItem("i", "g", "", "", "", truth))


def test_options_are_read_with_the_row() -> None:
    named = r"regex:(?P<answer>\d+)"
    assert fault_of(named, RewardItem("i", "g", "", "", "", "5")) == ""
    assert fault_of(r"regex:\d+", RewardItem("i", "g", "", "", "", None)) == ""
    assert "no text and no number" in fault_of(named, RewardItem("i", "g", "", "", "", {"a": 1}))
    assert fault_of("regex:(", RewardItem("i", "g", "", "", "", "5")) == "", "the start of a run says so"
    assert fault_of("mine.py:score", RewardItem("i", "g", "", "", "", None)) == ""


def test_auto_tells_it_for_the_scorer_of_the_source() -> None:
    truth = ["1", "2"]
    assert "one answer is meant" in fault_of("auto", RewardItem("i", "g", "openai/gsm8k", "", "", truth))
    assert fault_of("auto", RewardItem("i", "g", "exact_match", "", "", truth)) == ""
    assert "no tests" in fault_of("auto", RewardItem("i", "g", "taco", "", "", "34"))
    assert fault_of("auto", RewardItem("i", "g", "mystery", "", "", truth)) == "", "another finding names the source"


def test_instructions_are_tried_without_a_response() -> None:
    row = {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"words": 3}]}
    assert "number_words" in fault_of("ifeval", RewardItem("i", "g", "", "", "", None, row))
    unknown = {"instruction_id_list": ["punctuation:no_dots"]}
    assert "no_dots" in fault_of("ifeval_fraction", RewardItem("i", "g", "", "", "", None, unknown))
