"""The examples of agents, trained: episodes of several turns are scored, stored and trained, and tokens that were not
sampled are masked."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from examples import chats
from examples.calculator import prepare as calculator
from examples.guessing import prepare as guessing
from examples.openai_agent import prepare as openai_agent
from tests.integration.training import train

pytestmark = pytest.mark.slow
_SHORT: dict[str, Any] = {
    "learner__steps": 2,
    "learner__batch__groups": 6,
    "learner__optimizer__warmup_steps": 1,
    "logging__record": True,
}


def test_calls_of_a_calculator_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    # A short warm start, of calls alone.
    monkeypatch.setattr(calculator, "_GIVEN_UP", 0.0)
    monkeypatch.setattr(calculator, "_ROWS", 60)
    monkeypatch.setattr(chats, "_WARM_BATCH", 16)
    calculator.main(["--out", str(data), "--warm-steps", "40"])
    run = train("examples/calculator/calculator.yaml", data, tmp_path, **_SHORT)
    calls = [found for found in map(run.texts, run.trajectories()) if len(found) > 1]
    assert calls
    right = 0
    for (sampled, call), (answered, result), *_ in calls:
        assert sampled
        assert not answered
        assert "<tool_call>" in call
        assert result.startswith("<tool>")
        assert result.endswith("<end><assistant>")
        right += result.removeprefix("<tool>").removesuffix("<end><assistant>").isdigit()
    assert right
    assert all(1 < turns <= 3 for turns in run.metric("agent/turns/mean"))
    assert all(called > 0 for called in run.metric("agent/tool_calls/mean"))


@pytest.mark.exhaustive
def test_games_are_trained(tmp_path: Path) -> None:
    data = tmp_path / "data"
    guessing.main(["--out", str(data), "--warm-steps", "30"])
    run = train("examples/guessing/guessing.yaml", data, tmp_path, **_SHORT | {"learner__steps": 3})
    found = [run.texts(trajectory) for trajectory in run.trajectories()]
    assert max(len(game) for game in found) == 6, "three guesses, each behind something that was said"
    for (opened, opening), (guessed, _), *rest in found:
        assert not opened
        assert opening == "0-6<end><assistant>"
        assert guessed
        assert all(told.startswith("<user>") for sampled, told in rest if not sampled)
    found_it = sum(game[-1][1].endswith("<end>") and len(game) < 6 for game in found)
    assert fmean(run.metric("critic/score/mean")) >= found_it / len(found) > 0, (
        "a game that ends early has found the number"
    )


def test_an_agent_of_the_openai_package_is_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "data"
    openai_agent.main(["--out", str(data), "--warm-steps", "5"])
    run = train(
        *("examples/openai_agent/openai_agent.yaml", data, tmp_path),
        **_SHORT | {"algorithm__filter__zero_variance": False},
    )
    assert "episode failed" not in caplog.text
    assert len(run.metric("critic/score/mean")) == 2
    assert run.ledger.counters.failed == 0
    for (opened, opening), (sampled, _), *_ in map(run.texts, run.trajectories()):
        assert not opened
        assert "<user>" in opening
        assert opening.endswith("<assistant>")
        assert sampled
