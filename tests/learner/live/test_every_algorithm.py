"""Algorithms with the real buffer and rewards: groups are sampled, claimed, trained and committed.

One stands for all that ask the same of learner and mesh, and differ in formulas. These every algorithm goes through in
tests/learner/algorithms/test_presets.py.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest

from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.registry import ALGORITHMS
from rollmesh.learner.algorithms.types import UpdatePlan
from tests.learner.live.test_runs import records
from tests.learner.live.tiny import make_config, mesh_of, run_learner

pytestmark = pytest.mark.slow
# Settings of the formulas alone; all others change the data, the models or the order of the work.
_FORMULAS = {"advantage", "loss", "aggregation", "horizon", "normalize_advantages"}


def demands(algorithm: Algorithm) -> tuple[object, ...]:
    """All that an algorithm asks of learner and mesh."""
    assert isinstance(algorithm, PolicyGradient)
    settings = [(f.name, repr(getattr(algorithm.settings, f.name))) for f in fields(algorithm.settings)]
    further = tuple((name, value) for name, value in settings if name not in _FORMULAS)
    return algorithm.needs, frozenset(algorithm._wants.needs), further


def one_of_each() -> list[str]:
    """The first name of all that ask for the same."""
    found: dict[tuple[object, ...], str] = {}
    for name in ALGORITHMS.names:
        algorithm = load_algorithm(name, {}, UpdatePlan())
        if type(algorithm).__module__.endswith("presets"):
            found.setdefault(demands(algorithm), name)
    return list(found.values())


@pytest.mark.parametrize("name", one_of_each())
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
