"""Built-in scorers: right, wrong, and without a right answer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.chat.thoughts import THOUGHT_MARKS
from rollmesh.mesh.config.scorers.code import NAMES as CODE
from rollmesh.reward_service.outcomes import Failed, RewardItem, Scored, SpanValue
from rollmesh.reward_service.scorers import SCORERS
from rollmesh.reward_service.scorers.versions import VERSIONS, versions_of, versions_with_packages


def outcome(name: str, response: str, truth: Any, source: str = "") -> Any:
    return SCORERS[name](RewardItem("i", "g", source, "prompt", response, truth))


@pytest.mark.parametrize(
    ("name", "response", "truth", "total"),
    [
        ("exact_match", " cba\n", "cba", 1.0),
        ("exact_match", "CBA", "cba", 0.0),
        ("exact_match", "b", ["a", "b"], 1.0),
        ("exact_match", "7", 7, 1.0),
        ("strings", '"cba"', "cba", 1.0),
        ("strings", "cb", "cba", 0.0),
        ("strings", "'", "'", 1.0),
        ("arithmetic", "042", "42", 1.0),
        ("arithmetic", "40+2=42", 42, 1.0),
        ("arithmetic", "1,000.0", "1000", 1.0),
        ("arithmetic", "41 42", "42", 0.0),
        ("arithmetic", "", "42", 0.0),
        ("arithmetic", "nan", "42", 0.0),
        ("gsm8k", "2+3 is 5.\n#### 5", "long solution #### 5", 1.0),
        ("gsm8k", "so he pays $1,250.", "1250", 1.0),
        ("gsm8k", "#### 4 (not 5)", "5", 0.0),
        ("gsm8k", "no idea", "5", 0.0),
    ],
)
def test_scores(name: str, response: str, truth: Any, total: float) -> None:
    result = outcome(name, response, truth)
    assert isinstance(result, Scored)
    assert result.total == total


@pytest.mark.parametrize("marks", THOUGHT_MARKS)
@pytest.mark.parametrize(
    ("name", "thought", "answer", "truth"),
    [
        ("gsm8k", "#### 7", "It is 42.", "42"),
        ("math", r"\boxed{7}", "It is $42$.", "42"),
        ("choice", "#### A", "The answer is B.", "B"),
    ],
)
def test_thoughts_are_no_answer_unless_nothing_follows(
    marks: tuple[str, str], name: str, thought: str, answer: str, truth: str
) -> None:
    opening, closing = marks
    assert outcome(name, f"{opening}{thought}{closing}\n{answer}", truth).total == 1.0
    assert outcome(name, f"{opening}{answer}{closing}\n", truth).total == 1.0


def test_auto_picks_by_source_and_refuses_what_it_does_not_know() -> None:
    assert outcome("auto", "#### 42", "42", "openai/gsm8k").total == 1.0
    assert outcome("auto", "042", "42", "demo/arithmetic").total == 1.0
    assert outcome("auto", "042", "42", "strings").total == 0.0
    assert outcome("auto", "#### 42", "42", "OpenAI/GSM8K").total == 1.0
    for source in ("mystery", "mathematicians", "my_gsm8k", "openai/gsm8k-hard", "strings/code"):
        unknown = outcome("auto", "42", "42", source)
        assert isinstance(unknown, Failed)
        assert unknown.code == "no_scorer"
        assert source in unknown.message
    assert "openai/gsm8k," in unknown.message, "it lists what there is"
    assert "'openai/gsm8k'?" in outcome("auto", "42", "42", "openai/gsm8").message


def test_every_scorer_has_a_version() -> None:
    assert VERSIONS.keys() == {*SCORERS, *CODE}
    assert versions_of(["gsm8k", "mine.py:gsm8k", "regex:a:b"]) == {"gsm8k": "2", "regex": "2"}
    assert {"auto", "math", "qa", "environment"} <= versions_of(["auto"]).keys()
    assert versions_with_packages(["mine.py:score"]) == {}
    assert list(versions_with_packages(["choice"])) == ["rollmesh", "choice"]
    assert versions_with_packages(["math", "qa"])["math-verify"] == "0.8.0"


def test_an_episode_is_worth_what_its_environment_says() -> None:
    def judged(name: str, extra_info: dict[str, Any]) -> Any:
        return SCORERS[name](RewardItem("i", "g", "demo/arithmetic", "prompt", "41", "42", extra_info))

    worth = {"environment_reward": {"won": 1, "length": -0.25}}
    for name in ("environment", "auto"):
        assert judged(name, worth) == Scored(0.75, {"won": 1.0, "length": -0.25})
        assert judged(name, {"environment_reward": {"won": "lots"}}).code == "bad_output"
    assert judged("auto", {"index": 3}) == Scored(0.0), "else the source decides"
    assert judged("arithmetic", worth) == Scored(0.0)
    # Rewards of steps stand at their turns, and the last one at the end.
    steps = {"environment_reward": {"environment": 1.5}, "environment_steps": [0.5, 0, 1]}
    assert judged("auto", steps).spans == (SpanValue(0, 0, 0.5, turn=1, of_total=True),)
    assert judged("environment", steps | {"environment_steps": 3}).code == "bad_output"
    for nothing in ({}, {"environment_reward": {}}, {"environment_reward": None}):
        assert judged("environment", nothing).code == "no_environment_reward"


@given(st.text(max_size=60), st.integers(-(10**9), 10**9))
def test_any_text_gets_a_finite_score(response: str, truth: int) -> None:
    for name in ("arithmetic", "gsm8k", "exact_match", "strings"):
        assert outcome(name, response, truth).total in (0.0, 1.0)


@given(st.integers(-(10**12), 10**12))
def test_numbers_survive_formatting(value: int) -> None:
    for text in (str(value), f"{value:,}", f"{value}.0"):
        assert outcome("arithmetic", text, value).total == 1.0
        assert outcome("gsm8k", f"hence #### {text}", value).total == 1.0
