"""Refusals of the Python API before anything is started. A run by it: `tests/integration/test_run.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollmesh
from rollmesh.learner.standalone.response_file import RESPONSES, ResponseFile
from rollmesh.mesh.errors import ConfigError, RewardError
from tests.learner.data.conftest import record, write_jsonl
from tests.learner.trainers.tiny import write_chat_model
from tests.repository import REPOSITORY
from tests.rollmesh.evaluation.records import record as prompt_record


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {"run": {"dir": str(tmp_path)}, "model": {"path": "none"}, "data": {"train": "none.parquet"}}


def test_reward_fn_beside_endpoints_is_refused(config: dict[str, Any]) -> None:
    config["reward"] = {"endpoints": ["grpc://127.0.0.1:1"]}
    with pytest.raises(ConfigError, match="reward_fn is given"):
        rollmesh.train(config, reward_fn=lambda items: [1.0] * len(items), quiet=True)


def test_reward_fn_that_is_none_is_refused(config: dict[str, Any]) -> None:
    for wrong in (3, [3]):
        with pytest.raises(ConfigError, match="reward_fn: 3 is no reward function"):
            rollmesh.train(config, reward_fn=wrong)  # type: ignore[arg-type, list-item]


def test_reward_fn_with_unknown_signature_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="no known signature"):
        rollmesh.train(config, reward_fn=lambda a, b: 1.0, quiet=True)


def test_names_are_loaded_when_they_are_used() -> None:
    script = "import rollmesh, sys; assert 'rollmesh.mesh.config' not in sys.modules; rollmesh.Config"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rollmesh.nothing


def test_an_evaluation_is_continued_with_the_same_reward_function_alone(tmp_path: Path) -> None:
    """All its prompts have responses already, so that no service starts."""
    values = {
        "model": {"path": str(write_chat_model(tmp_path / "m"))},
        "data": {"eval": str(write_jsonl(tmp_path / "held.jsonl", [record(0)]))},
        "rollout": {"max_prompt_tokens": 32, "max_response_tokens": 32},
        "eval": {"right_at": 0.5},
    }
    out = tmp_path / "out"
    out.mkdir()
    with ResponseFile(out / RESPONSES) as file:
        file.append([prompt_record(0, [0.5])])

    def evaluate(scale: float, *overrides: str) -> float:
        def score(solution_str: str, ground_truth: str) -> float:
            return scale * (solution_str == ground_truth)

        found = rollmesh.evaluate(values, None, score, overrides=overrides, out=out, quiet=True)
        return found.metrics["mean@1"].value

    assert evaluate(1.0) == 0.5
    assert evaluate(1.0) == 0.5
    with pytest.raises(ConfigError, match=r"differs in reward\.functions"):
        evaluate(2.0)
    with pytest.raises(ConfigError, match=r"differs in reward\.by_data_source"):
        evaluate(1.0, "reward.by_data_source={addition: [math]}")
