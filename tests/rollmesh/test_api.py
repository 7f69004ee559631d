"""Refusals of the Python API before anything is started. A run by it: `tests/integration/test_run.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollmesh
from rollmesh.mesh.errors import ConfigError, RewardError
from tests.repository import REPOSITORY


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
