"""Every algorithm by its name, with the real buffer and rewards: groups are sampled, claimed, trained and committed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.registry import ALGORITHMS
from rollmesh.learner.algorithms.types import UpdatePlan
from tests.learner.live.test_runs import records
from tests.learner.live.tiny import make_config, mesh_of, run_learner

pytestmark = pytest.mark.slow
PRESETS = [
    name for name in ALGORITHMS.names if type(load_algorithm(name, {}, UpdatePlan())).__module__.endswith("presets")
]


@pytest.mark.parametrize("name", PRESETS)
def test_trains_in_the_mesh(tmp_path: Path, name: str) -> None:
    changes = {"algorithm.name": name, "learner.steps": 2, "learner.batch.minibatches": 2, "data.eval": None}
    if name == "prime":
        changes["algorithm.filter"] = {"accuracy_low": None, "accuracy_high": None}
    if name == "vapo":
        changes["algorithm.critic_warmup"] = 0
    config = make_config(tmp_path, changes)
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
    steps = [record for record in records(config) if "critic/score/mean" in record]
    assert len(steps) == 2
    for step in steps:
        assert step["skipped_updates"] == 0
        assert math.isfinite(step["critic/advantages/mean"])
        assert math.isfinite(step["actor/grad_norm"])
