"""Algorithms with the real buffer and rewards: groups are sampled, claimed, trained and committed.

One stands for all that ask the same of the other services, and for the same models. Every algorithm goes through all
that it asks of the learner alone in tests/learner/algorithms/test_presets.py. `make test-all` trains one of each here
too.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.registry import ALGORITHMS
from rollmesh.learner.algorithms.types import UpdatePlan
from tests.learner.live.test_runs import records
from tests.learner.live.tiny import make_config, mesh_of, run_learner

# Settings of the formulas alone; all others change the data, the models or the order of the work.
_FORMULAS = {"advantage", "loss", "aggregation", "horizon", "normalize_advantages"}
# Other tests of this folder train these in the mesh: test_runs, test_roles and test_metric_names.
_ELSEWHERE = ("grpo", "ppo", "vapo", "remax", "prime")


def of_the_mesh(algorithm: Algorithm) -> tuple[object, ...]:
    """All that an algorithm asks of others than the learner, and the models that it is built with."""
    assert isinstance(algorithm, PolicyGradient)
    needs = algorithm.needs
    return needs.roles, needs.greedy_baseline, needs.components, "components" in algorithm._wants.needs


def demands(algorithm: Algorithm) -> tuple[object, ...]:
    """All that an algorithm asks of learner and mesh, settings apart."""
    assert isinstance(algorithm, PolicyGradient)
    return algorithm.needs, frozenset(algorithm._wants.needs)


def settings_of(algorithm: Algorithm) -> tuple[object, ...]:
    """Its settings but for those of the formulas."""
    settings: Any = algorithm.settings  # type: ignore[attr-defined]
    return tuple(repr(getattr(settings, field.name)) for field in fields(settings) if field.name not in _FORMULAS)


def one_of_each() -> list[Any]:
    """The first name of all that ask the mesh for the same. In the second tier, of all with the same demands and
    settings.
    """
    algorithms = {name: load_algorithm(name, {}, UpdatePlan()) for name in [*_ELSEWHERE, *ALGORITHMS.names]}
    asked = {of_the_mesh(algorithms[name]) for name in _ELSEWHERE}
    seen = {(demands(algorithms[name]), settings_of(algorithms[name])) for name in _ELSEWHERE}
    found = []
    for name, algorithm in algorithms.items():
        if not type(algorithm).__module__.endswith("presets"):
            continue
        what = (demands(algorithm), settings_of(algorithm))
        if what not in seen:
            found.append(pytest.param(name, marks=[pytest.mark.exhaustive] * (of_the_mesh(algorithm) in asked)))
        asked.add(of_the_mesh(algorithm))
        seen.add(what)
    return found


@pytest.mark.parametrize("name", one_of_each())
def test_trains_in_the_mesh(tmp_path: Path, name: str) -> None:
    changes = {"algorithm.name": name, "learner.steps": 2, "learner.batch.minibatches": 2, "data.eval": None}
    config = make_config(tmp_path, changes)
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
    assert_trained([record for record in records(config) if "critic/score/mean" in record])


def assert_trained(steps: list[dict[str, Any]]) -> None:
    """Asserts two steps, each with an update."""
    assert len(steps) == 2
    for step in steps:
        assert step["skipped_updates"] == 0
        assert math.isfinite(step["critic/advantages/mean"])
        assert math.isfinite(step["actor/grad_norm"])
