"""The launcher and the Python API with the real services: a whole mesh on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import rollmesh
from examples.demo.prepare import main as prepare
from mesh.errors import ConfigError, RewardError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    prepare(["--out", str(out), "--warm-steps", "5", "--held-out", "8"])
    return out


@pytest.fixture
def config(data: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "run": {"name": "small", "dir": str(tmp_path)},
        "model": {"path": str(data / "model")},
        "data": {"train": str(data / "train.parquet"), "eval": str(data / "eval.parquet")},
        "algorithm": "grpo",
        "rollout": {"device": "cpu", "n": 4, "max_prompt_tokens": 16, "max_response_tokens": 4, "slots": 32},
        "learner": {"device": "cpu", "steps": 3, "batch": {"groups": 4}, "optimizer": {"lr": 1e-4}},
        "checkpoint": {"every_steps": 5},
        "network": {"metrics": False},
    }


def assert_balanced(summary: rollmesh.Summary, steps: int) -> None:
    assert summary.steps == steps
    assert {table: state["discrepancies"] for table, state in summary.ledger.items()} == {"train": [], "eval": []}


@pytest.mark.slow
def test_train_serves_a_function_of_this_process(config: dict[str, Any]) -> None:
    """To a mesh of three fronts, and of a learner with two ranks that trains by a user's algorithm."""
    threads: set[str] = set()

    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        threads.add(threading.current_thread().name)
        return float(len(solution_str) % 2)

    config["algorithm"] = f"{ROOT / 'examples' / 'dataflows' / 'rejection_sampling.py'}:RejectionSampling"
    config["buffer"] = {"fronts": 3}
    config["learner"]["ranks"] = 2
    summary = rollmesh.train(config, reward_fn=reward, quiet=True)
    assert threads
    assert {"buffer", "buffer-1", "buffer-2"} <= set(summary.peak_memory_mb)
    assert summary.restarts == {}
    assert summary.ended == "finished"
    assert_balanced(summary, steps=3)
    assert summary.groups_by_fate["trained"] == 12
    assert summary.held_out_last is not None
    # No reward service was started: the function was called here.
    assert "reward" not in summary.peak_memory_mb
    assert summary.peak_memory_mb["learner"] > 50
    for name in ("summary.json", "report.html"):
        assert (Path(summary.folder) / name).is_file()


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
    script = "import rollmesh, sys; assert 'mesh.config' not in sys.modules; rollmesh.Config; rollmesh.load_config"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rollmesh.nothing
