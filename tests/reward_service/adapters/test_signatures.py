"""Functions in the forms of verl, TRL and OpenRLHF, and arguments of functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.mesh.config.scorers.parts import part_names
from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.functions import adapt
from rollmesh.reward_service.loading import load_function
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored, Unscorable

_HERE = str(Path(__file__))


def _item(response: str = "42", **extra: Any) -> RewardItem:
    return RewardItem(response, "g", "source", "40+2=", response, "42", extra, [1, 2], policy_version=7)


def _run(function: Callable[..., Any], *items: RewardItem) -> list[Outcome]:
    adapted = adapt("f", function)
    return asyncio.run(adapted.score_async(items)) if adapted.asynchronous else adapted.score(items)


def weighted(solution_str: str, ground_truth: Any, weight: float = 1.0, mode: str = "exact") -> dict[str, float]:
    return {"score": weight * (solution_str == ground_truth), "is_strict": mode == "strict"}


def batch(
    data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, scale: float = 1.0, **kwargs: Any
) -> list[Any]:
    assert list(data_sources) == ["source"] * len(solution_strs)
    assert [info["index"] for info in extra_infos] == list(range(len(solution_strs)))
    scores = [scale * (text == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]
    return [{"score": score, "acc": score > 0} if score else score for score in scores]


async def batch_async(solution_strs: Any, ground_truths: Any) -> Any:
    return np.array([float(text == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)])


def test_verl_in_batches() -> None:
    outcomes = _run(batch, _item(index=0), _item("41", index=1))
    assert outcomes == [Scored(1.0, {"acc": 1.0}), Scored(0.0)]
    assert adapt("f", batch).whole_group
    assert _run(batch_async, _item(), _item("41")) == [Scored(1.0), Scored(0.0)]


def test_verl_in_batches_with_too_few_scores() -> None:
    (failed, _) = _run(lambda solution_strs, ground_truths: [1.0], _item(), _item("41"))
    assert isinstance(failed, Failed)
    assert failed.code == "bad_output"


def test_arguments_of_a_function_are_fixed() -> None:
    function = load_function(f"{_HERE}:weighted(weight=0.5, mode='strict')")
    assert function.name == "weighted"
    # A column of the data with the same name does not replace it.
    assert function.score([_item(weight=3.0)]) == [Scored(0.5, {"is_strict": 1.0})]
    assert load_function(f"{_HERE}:batch(scale=2.0)").score([_item(index=0)]) == [Scored(2.0, {"acc": 1.0})]
    assert load_function(f"{_HERE}:weighted()").score([_item()]) == [Scored(1.0, {"is_strict": 0.0})]


def test_the_same_function_with_other_arguments_is_another_one() -> None:
    specs = [f"{_HERE}:weighted", f"{_HERE}:weighted(weight=0.5)", "regex:(a):b(c)"]
    assert part_names(specs) == [f"{specs[0]}#0", f"{specs[1]}#1", "regex"]


@pytest.mark.parametrize("arguments", ["0.5", "weight=open('x')", "weight=", "**{}", "weight=1)(2"])
def test_arguments_that_are_no_literals_by_name_are_refused(arguments: str) -> None:
    with pytest.raises(RewardError, match="its arguments cannot be read"):
        load_function(f"{_HERE}:weighted({arguments})")


def test_an_argument_that_the_function_lacks_is_named() -> None:
    with pytest.raises(RewardError, match="wieght"):
        load_function(f"{_HERE}:weighted(wieght=0.5)")


def test_openrlhf() -> None:
    def reward_func(queries: Any, prompts: Any, labels: Any) -> Any:
        assert queries == ["40+2=42", "40+2=41"]
        assert prompts == ["40+2="] * 2
        rewards = np.array([float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)])
        return {"rewards": rewards, "scores": rewards / 2, "extra_logs": {"length": [2, 3]}}

    assert _run(reward_func, _item(), _item("41")) == [
        Scored(1.0, {"length": 2.0, "scores": 0.5}),
        Scored(0.0, {"length": 3.0, "scores": 0.0}),
    ]
    assert _run(lambda queries, prompts, labels: [0.5, None], _item(), _item("41"))[0] == Scored(0.5)


@pytest.mark.parametrize("answer", [{}, {"rewards": [1.0]}, {"rewards": "12"}, {"rewards": [1, 2], "extra_logs": 3}, 1])
def test_openrlhf_without_rewards(answer: Any) -> None:
    (failed, _) = _run(lambda queries, prompts, labels: answer, _item(), _item("41"))
    assert isinstance(failed, Failed)
    assert failed.code == "bad_output"


def test_trl_keeps_what_functions_log() -> None:
    def reward(completions: Any, log_extra: Any, log_metric: Any, trainer_state: Any, **kwargs: Any) -> Any:
        log_extra("found", completions)
        log_extra("length", [len(text) for text in completions])
        log_metric("share", 0.5)
        assert trainer_state.global_step == 7
        return [1.0, None]

    async def reward_async(completions: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return reward(completions, **kwargs)

    for function in (reward, reward_async):
        first, second = _run(function, _item(), _item("41"))
        assert first == Scored(1.0, {"length": 2.0, "share": 0.5}, evidence="found: 42")
        assert isinstance(second, Unscorable)


def test_trl_logs_of_another_size_are_an_error() -> None:
    (failed, _) = _run(lambda completions, log_extra: log_extra("x", [1]), _item(), _item("41"))
    assert isinstance(failed, Failed)
    assert failed.code == "bad_output"


@pytest.mark.parametrize(
    "value", [1, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), np.array([1.0]), np.array([[1]])]
)
def test_numbers_of_all_libraries_are_numbers(value: Any) -> None:
    def judge(solution_str: str, ground_truth: Any) -> dict[str, Any]:
        return {
            "score": value,
            "part": value,
            "list": [1, 2],
            "two": np.array([1, 2]),
            "text": np.str_("x"),
            "no": None,
        }

    assert _run(judge, _item()) == [Scored(1.0, {"part": 1.0})]
    assert _run(lambda solution_str, ground_truth: value, _item()) == [Scored(1.0)]

    def logging(prompts: Any, completions: Any, log_extra: Any, **_: Any) -> list[Any]:
        log_extra("part", [value])
        return [value]

    assert _run(logging, _item()) == [Scored(1.0, {"part": 1.0})]


def test_a_tensor_of_one_element_is_a_number_and_one_of_two_is_none() -> None:
    import torch

    def judge(solution_str: str, ground_truth: Any) -> dict[str, Any]:
        return {"score": torch.tensor([2.0]), "part": torch.tensor(0.5), "two": torch.ones(2)}

    assert _run(judge, _item()) == [Scored(2.0, {"part": 0.5})]
    for several in (torch.ones(2), np.ones(2), np.array([]), [1.0]):
        (failed,) = _run(lambda solution_str, ground_truth, several=several: several, _item())
        assert isinstance(failed, Failed)
        assert failed.code == "bad_output"


def test_a_score_of_none_in_a_dict_is_none() -> None:
    (found,) = _run(lambda solution_str, ground_truth: {"score": None, "acc": 1.0}, _item())
    assert isinstance(found, Unscorable)
    (batched, _) = _run(lambda solution_strs, ground_truths: [{"score": None}, 1.0], _item(), _item("41"))
    assert isinstance(batched, Unscorable)


@pytest.mark.parametrize(("pred", "answer"), [("42", "42"), (42, "42"), (None, ""), ("[INVALID]", ""), ("", "")])
def test_the_answer_of_verls_dict_is_kept(pred: Any, answer: str) -> None:
    (found,) = _run(lambda solution_str, ground_truth: {"score": 1.0, "pred": pred}, _item())
    assert isinstance(found, Scored)
    assert found.answer == answer
    (plain,) = _run(lambda solution_str, ground_truth: {"score": 1.0}, _item())
    assert isinstance(plain, Scored)
    assert plain.answer is None
