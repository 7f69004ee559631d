"""Rewards of verifiers: the same numbers as its own, and errors where its own are 0."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.loading import load_function
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored

_FILE = f"verifiers:{Path(__file__).with_name('rubrics.py')}"
_TEXTS = ["<answer>42</answer>", "<answer>41</answer> long", "42", "nothing at all wrong"]
# Rewards that `Rubric.score_group` of verifiers 0.1.14 gives to these functions and texts.
_RECORDED = [1.1, 0.2, 1.1, 0.1]


def _items(*texts: str, **extra: Any) -> list[RewardItem]:
    return [RewardItem(str(n), "g", "source", "q", text, "42", extra, [1]) for n, text in enumerate(texts)]


def _scored(spec: str, items: list[RewardItem]) -> list[Outcome]:
    return asyncio.run(load_function(spec).score_async(items))


def test_a_rubric_gives_what_it_gives_there() -> None:
    outcomes = _scored(f"{_FILE}:rubric", _items(*_TEXTS, k=1))
    assert [round(outcome.total, 9) for outcome in outcomes if isinstance(outcome, Scored)] == _RECORDED
    first, *_, last = outcomes
    assert isinstance(first, Scored)
    assert isinstance(last, Scored)
    assert first.components == {"exact": 1.0, "of_the_row": 0.5, "fails_for_wrong": 1.0, "longest": 0.0}
    assert "fails_for_wrong" not in last.components, "a metric that fails is left out"


def test_arguments_go_to_the_function_that_makes_it() -> None:
    (outcome,) = _scored(f"{_FILE}:rubric(bonus=2.0)", _items("x", k=1))
    assert isinstance(outcome, Scored)
    assert outcome.total == pytest.approx(1.1)


def test_what_a_function_raises_is_no_zero_and_fails_its_item_alone() -> None:
    good, bad = _scored(f"{_FILE}:partly", _items("right", "wrong"))
    assert good == Scored(1.0, {"fails_for_wrong": 1.0})
    assert isinstance(bad, Failed)
    assert (bad.code, bad.message) == ("exception", "fails_for_wrong raised ValueError: no score")


def test_an_environment_of_texts() -> None:
    assert [outcome.total for outcome in _scored(f"{_FILE}:environment", _items("42", "41"))] == [1.0, 0.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own", "scores by a method of its own"),
        ("empty", "has no reward functions"),
        ("absent", "no 'absent' there"),
        ("Parser", "has no rewards"),
        ("own(x=1)", "is no function"),
    ],
)
def test_what_has_no_rewards_is_refused_with_the_reason(name: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        load_function(f"{_FILE}:{name}")


def test_without_the_package_the_error_says_where_it_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(RewardError, match="ModuleNotFoundError") as caught:
        load_function("verifiers:gsm8k")
    assert "reward.python" in caught.value.hint


def test_an_installed_environment_is_asked_for_its_rubric(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_environment(name: str, **arguments: Any) -> Any:
        asked.append((name, arguments))
        from tests.reward_service.adapters import rubrics

        return SimpleNamespace(rubric=rubrics.rubric(), message_type="chat")

    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(load_environment=load_environment))
    function = load_function("verifiers:owner/gsm8k(split='train', n=3)")
    assert asked == [("owner/gsm8k", {"split": "train", "n": 3})]
    assert function.whole_group
    assert function.name == "gsm8k"


class _Data:
    model_fields = ("prompt", "answer", "bonus")

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    model_construct = classmethod(lambda cls: cls())

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> Any:
        if "bonus" not in fields:
            raise ValueError("bonus is missing")
        return cls(**fields)


class _Task:
    """As much of a task of verifiers.v1 as is called."""

    def __init__(self, data: Any, config: Any) -> None:
        self.data = data
        del config

    data_type = classmethod(lambda _cls: _Data)

    def hooks(self, _kind: str) -> list[Any]:
        return [self.exact]

    def plugged_judges(self) -> list[Any]:
        return []

    async def exact(self, trace: Any) -> float:
        return float(trace.nodes[-1]["message"]["content"] == self.data.fields["answer"])

    async def score(self, trace: Any) -> None:
        if trace.nodes[-1]["message"]["content"] == "raise":
            raise ValueError("no score")
        value = await self.exact(trace)
        trace.rewards = {"exact": SimpleNamespace(score=value)}
        trace.metrics = {"length": 2.0, "unknown": None}
        trace.reward = value + 0.5 * self.data.fields["bonus"]


class _InABox(_Task):
    async def exact(self, trace: Any, runtime: Any) -> float:  # type: ignore[override]
        raise NotImplementedError


@pytest.fixture
def _tasks_api(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SimpleNamespace
    api = space(Trace=space, TraceTask=space, AgentInfo=space, AgentConfig=space)
    monkeypatch.setitem(sys.modules, "verifiers", space(v1=api))
    monkeypatch.setitem(sys.modules, "verifiers.v1", api)
    monkeypatch.setitem(sys.modules, "tasks_here", space(Task=_Task, InABox=_InABox))  # type: ignore[arg-type]


@pytest.mark.usefixtures("_tasks_api")
def test_a_task_scores_each_conversation_alone() -> None:
    items = [*_items("42", "41", "raise", bonus=1.0), *_items("42")]
    right, wrong, raised, malformed = _scored("verifiers:tasks_here:Task", items)
    assert right == Scored(1.5, {"exact": 1.0, "length": 2.0})
    assert wrong == Scored(0.5, {"exact": 0.0, "length": 2.0})
    assert isinstance(raised, Failed)
    assert (raised.code, raised.retryable) == ("exception", False)
    assert isinstance(malformed, Failed)
    assert malformed.code == "bad_input"


@pytest.mark.usefixtures("_tasks_api")
def test_a_reward_that_needs_a_runtime_is_refused() -> None:
    with pytest.raises(RewardError, match="needs the runtime of a rollout"):
        load_function("verifiers:tasks_here:InABox")


def test_with_the_real_package() -> None:
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed: the recorded numbers stand for it")
    if not hasattr(verifiers, "Rubric"):
        pytest.skip("this version of verifiers has tasks instead of rubrics")
    from tests.reward_service.adapters import rubrics

    real = verifiers.Rubric(funcs=[rubrics.exact, rubrics.longest], weights=[1.0, 0.1], parser=rubrics.Parser())
    states = [
        verifiers.State(prompt=[], completion=[{"role": "assistant", "content": text}], answer="42", trajectory=[])
        for text in _TEXTS
    ]
    asyncio.run(real.score_group(states))
    ours = _scored(f"{_FILE}:rubric(bonus=0.0)", _items(*_TEXTS, k=1))
    assert [round(outcome.total, 9) for outcome in ours if isinstance(outcome, Scored)] == [
        round(state["reward"], 9) for state in states
    ]
