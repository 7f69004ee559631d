"""`rollmesh reward try` and `audit` as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.audit.trial import INTERRUPTED, show_trial, trial_of
from rollmesh.mesh.errors import ConfigError, DataError

CONFIG = "model: {path: m}\ndata: {train: t.jsonl}\nalgorithm: grpo\nreward: {functions: [exact_match]}\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with samples of two steps; the reward of one was another function's."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    samples = [
        {
            "step": step,
            "group": "g",
            "member": member,
            "prompt": "p",
            "response": str(member),
            "reward": float(member == 1),
        }
        | {"ground_truth": "1", "data_source": "s"}
        for step in (1, 2)
        for member in range(3)
    ]
    samples[-1]["reward"] = 1.0
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    return tmp_path


def shown(source: Path, *overrides: str, as_json: bool = False, **options: Any) -> tuple[int, str]:
    given: dict[str, Any] = {"steps": None, "limit": None, **options}
    functions, endpoint = given.pop("functions", []), given.pop("endpoint", None)
    trial = trial_of(source, given.pop("config", None), overrides, functions, endpoint, None, **given)
    said: list[str] = []
    return show_trial(trial, said.append, [].append if as_json else said.append, as_json=as_json), "\n".join(said)


def test_a_run_is_tried_with_its_own_reward(run: Path) -> None:
    status, text = shown(run)
    assert status == 1
    assert "1 of 6 recorded rewards are others now" in text
    assert "step 2, group g/2: recorded 1, now 0" in text
    assert shown(run, steps=[1])[0] == 0


def test_functions_and_configurations_are_named(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(CONFIG)
    status, text = shown(run, "--reward.functions=[none]", config=other, as_json=True)
    assert status == 1
    report = json.loads(text)
    assert report["complete"]
    assert len(report["summary"]["differing"]) == 3
    assert shown(run, functions=["exact_match"], steps=[1])[0] == 0
    with pytest.raises(ConfigError, match="none is given"):
        shown(run, "--reward.functions=[none]")


def test_a_configuration_of_the_reward_alone_is_enough(run: Path) -> None:
    config = run / "reward.yaml"
    config.write_text("reward: {functions: [none]}\n")
    status, text = shown(run / "samples.jsonl", "--reward.functions=[exact_match]", config=config)
    assert (status, "6 responses: scored 6" in text) == (1, True), text


def test_what_has_no_responses_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "p", "data_source": "s", "reward_model": {"ground_truth": "1"}}))
    with pytest.raises(DataError, match="no response to try"):
        shown(rows)
    (tmp_path / "config.yaml").write_text(CONFIG)
    with pytest.raises(DataError, match="no samples"):
        shown(tmp_path)


def test_an_interrupt_shows_what_is_there(run: Path) -> None:
    trial = trial_of(run, None, [], [], None, None, steps=None, limit=None)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            # As asyncio ends a run on SIGINT, which could come after the last response here.
            raise KeyboardInterrupt

    assert show_trial(trial, say, said.append, as_json=False) == INTERRUPTED
    assert said[-1].startswith("interrupted")
    assert any("responses: scored" in line for line in said)
