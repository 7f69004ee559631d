"""Held-out values are comparable where rewards, held-out data and sampling are the same, by content."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.learner.evaluation.measurement_identity import measured_by
from rollmesh.mesh.config import Config, load_config


def make(files: Path, *overrides: str) -> Config:
    values = {
        "model": {"path": "m"},
        "data": {"train": "t.jsonl", "eval": str(files / "held.jsonl")},
        "reward": {"functions": [f"{files}/own.py:score", "math"]},
    }
    return load_config(values, overrides)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text("def score(): return 1.0")
    (tmp_path / "held.jsonl").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("learner.steps=7", True),
        ("rollout.replicas=4", True),
        ("reward.workers=3", True),
        ("rollout.agent.workers=3", True),
        ("reward.endpoints=['grpc://127.0.0.1:9']", False),
        ("reward.by_data_source={a: ['grpc://127.0.0.1:9']}", False),
        ("reward.functions=[math]", False),
        ("data.prompt_key=question", False),
        ("eval.n=2", False),
        ("rollout.max_response_tokens=77", False),
    ],
)
def test_settings_that_change_what_values_mean(files: Path, override: str, same: bool) -> None:
    assert (measured_by(make(files, override)) == measured_by(make(files))) == same


def test_files_count_by_content_and_services_wherever_they_are(files: Path) -> None:
    before = measured_by(make(files))
    (files / "own.py").rename(files / "moved.py")
    moved = f"reward.functions=['{files}/moved.py:score', math]"
    assert measured_by(make(files, moved)) == before
    (files / "moved.py").write_text("def score(): return 2.0")
    assert measured_by(make(files, moved)) != before
    (files / "moved.py").write_text("def score(): return 1.0")
    (files / "held.jsonl").write_text("[]")
    assert measured_by(make(files, moved)) != before
    ports = [f"reward.by_data_source={{a: ['grpc://127.0.0.1:{port}']}}" for port in (1, 2)]
    assert measured_by(make(files, ports[0])) == measured_by(make(files, ports[1]))
