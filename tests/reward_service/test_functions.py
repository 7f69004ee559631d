"""The three signatures are taken unchanged; what a function gets wrong is named, never scored as zero."""

import asyncio
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.config.scorers.parts import part_names
from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.functions import adapt
from rollmesh.reward_service.loading import load_function
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored, SpanValue, Unscorable, later
from tests.repository import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "custom_reward.py"


def item(response: str = "42", **extra: Any) -> RewardItem:
    return RewardItem("i", "g", "source", "40+2=", response, "42", extra, [1, 2])


def run(function: Callable[..., Any], *items: RewardItem) -> list[Outcome]:
    adapted = adapt("f", function)
    given = items or (item(),)
    return asyncio.run(adapted.score_async(given)) if adapted.asynchronous else adapted.score(given)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    assert (data_source, extra_info) == ("source", {"index": 3})
    return float(solution_str == ground_truth)


async def compute_score_async(data_source, solution_str, ground_truth, extra_info, **kwargs):
    await asyncio.sleep(0)
    return {"score": 0.5, "acc": True, "pred": "text", "length": len(solution_str)}


def reward_func(prompts, completions, completion_ids, answer, **kwargs):
    assert prompts == ["40+2=", "40+2="]
    assert completion_ids == [[1, 2], [1, 2]]
    assert {"ground_truth", "data_source", "extra_info", "trainer_state", "log_metric"} <= kwargs.keys()
    return [1.0 if c == a else None for c, a in zip(completions, answer, strict=True)]


class Judge:
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text)) for text in completions]


def test_verl_signature() -> None:
    assert run(compute_score, item(index=3)) == [Scored(1.0)]


def test_verl_coroutine_with_a_dict() -> None:
    assert run(compute_score_async) == [Scored(0.5, {"acc": 1.0, "length": 2.0})]


def test_verl_function_that_takes_part_of_it() -> None:
    assert run(lambda solution_str, ground_truth: solution_str == ground_truth) == [Scored(1.0)]


def test_trl_signature_with_columns_and_none() -> None:
    outcomes = run(reward_func, item(answer="42"), item("41", answer="42"))
    assert outcomes[0] == Scored(1.0)
    assert isinstance(outcomes[1], Unscorable)


def test_trl_callable_object_and_partial() -> None:
    assert run(Judge()) == [Scored(2.0)]
    assert run(functools.partial(Judge(), scale=2)) == [Scored(2.0)]


def test_trl_gets_messages_where_the_prompt_was_messages() -> None:
    messages = [{"role": "user", "content": "40+2="}]

    def judge(prompts: Any, completions: Any) -> list[float]:
        assert prompts == [messages]
        assert completions == [[{"role": "assistant", "content": "42"}]]
        return [1.0]

    assert run(judge, item(prompt_messages=messages)) == [Scored(1.0)]


def test_own_signature_with_typed_outcomes() -> None:
    def score(items: Sequence[RewardItem]) -> list[Any]:
        return [Scored(1.0, per_token=[0.5, 0.5]), Unscorable("ambiguous"), Failed("judge", "away", True), 2, None]

    outcomes = run(score, *[item()] * 5)
    assert [type(outcome) for outcome in outcomes] == [Scored, Unscorable, Failed, Scored, Unscorable]


def test_verl_function_with_rewards_of_parts_or_a_promise() -> None:
    assert run(verl({"score": 1.0, "spans": [(0, 1, 0.5), [1, 2, 0.25]]})) == [
        Scored(1.0, spans=(SpanValue(0, 1, 0.5), SpanValue(1, 2, 0.25)))
    ]
    assert run(verl(later("job-1"))) == [Failed("pending", "job-1", retryable=True)]


@pytest.mark.parametrize("bad", [lambda text: 0.0, lambda: 0.0, lambda **kwargs: 0.0, lambda items, more: []])
def test_an_unknown_signature_is_refused(bad: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match="no known signature"):
        adapt("mine", bad)


def verl(result: Any) -> Callable[..., Any]:
    return lambda data_source, solution_str, ground_truth, extra_info: result


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (verl(math.nan), "nan"),
        (verl({"score": math.inf}), "nan"),
        (verl({"score": 1e39}), "nan"),
        (verl(10**400), "bad_output"),
        (verl({"score": 1.0, "spans": [(0, 3, 1.0)]}), "bad_span"),
        (verl({"score": 1.0, "spans": [1.0]}), "bad_output"),
        (verl({"score": 1.0, "part": math.nan}), "nan"),
        (verl("1.0"), "bad_output"),
        (verl({"reward": 1.0}), "bad_output"),
        (verl(object()), "bad_output"),
        (lambda completions: [1.0, 2.0], "bad_output"),
        (lambda completions: 1.0, "bad_output"),
        (lambda completions, solution: [1.0], "bad_input"),
        (lambda completions: 1 / 0, "exception"),
        (lambda completions: exit(1), "exception"),
        (lambda items: [Scored(1.0, per_token=[1.0])], "per_token_length"),
        (lambda items: [Scored(1.0, per_token=[1.0, math.nan])], "nan"),
    ],
)
def test_what_goes_wrong_is_an_error_with_the_functions_name(function: Callable[..., Any], code: str) -> None:
    (outcome,) = run(function)
    assert isinstance(outcome, Failed)
    assert outcome.code == code
    assert "f" in outcome.message.split()[0]
    assert not outcome.retryable


def test_a_failed_connection_may_be_tried_again() -> None:
    def judge(completions: list[str]) -> list[float]:
        raise ConnectionResetError("judge went away")

    (outcome,) = run(judge)
    assert outcome == Failed("exception", "f raised ConnectionResetError: judge went away", retryable=True)


def test_the_missing_column_is_named() -> None:
    (outcome,) = run(lambda completions, solution: [1.0])
    assert isinstance(outcome, Failed)
    assert "solution" in outcome.message
    assert "extra_info" in outcome.message


# ---------------------------------------------------------------------------------------------- loading


def test_example_file_by_path() -> None:
    specs = [f"{EXAMPLE}:compute_score", f"{EXAMPLE}:group_diversity"]
    both = [load_function(spec, name=name) for spec, name in zip(specs, part_names(specs), strict=True)]
    assert [function.name for function in both] == ["compute_score", "group_diversity"]
    assert both[0].score([item()]) == [Scored(1.0, {"is_number": 1.0})]
    same, other = item("1"), item("2")
    totals = [o.total for o in both[1].score([same, same, other]) if isinstance(o, Scored)]
    assert totals[0] == totals[1] < totals[2]


def test_file_with_neighbours_and_dataclass(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("BONUS = 2.0\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom neighbour_of_reward import BONUS\n"
        "@dataclasses.dataclass\nclass Rule:\n    bonus: float = BONUS\n"
        "def score(solution_str, ground_truth): return Rule().bonus\n"
    )
    assert load_function(f"{tmp_path}/mine.py:score").score([item()]) == [Scored(2.0)]


def test_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_beside_me.py").write_text("def score(solution_str, ground_truth): return 3\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("reward_beside_me:score").score([item()]) == [Scored(3.0)]


def test_functions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("def compute_score(solution_str, ground_truth): return 1\n")
    names = part_names([f"{tmp_path}/{name}.py:compute_score" for name in ("one", "two")])
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("exact_mach", "did you mean 'exact_match'"),
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("/nowhere/mine.py:f", "no file /nowhere/mine.py"),
        (f"{EXAMPLE}:compute_scor", "did you mean 'compute_score'"),
        ("mine.py", "mine.py:FUNCTION"),
        ("{use: math, weight: 2}", "without quotes"),
    ],
)
def test_a_wrong_name_says_what_to_do(spec: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        load_function(spec)


def test_a_wrong_argument_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def score(solution_str, ground_truth, scale=1.0): return scale\n")
    with pytest.raises(RewardError, match=r"mine.py:score has no argument 'scal'.*did you mean 'scale'"):
        load_function(f"{path}:score(scal=0.5)")


def test_a_file_that_raises_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(RewardError, match="importing it raised ModuleNotFoundError"):
        load_function(f"{tmp_path}/broken.py:f")
