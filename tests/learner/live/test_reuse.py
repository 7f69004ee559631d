"""A run that trains groups several times, drawn by priorities that the learner sets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rollmesh.learner.algorithms.types import Group
from rollmesh.learner.coordinator.priorities import reward_std
from rollmesh.mesh.errors import ConfigError
from tests.learner.live.test_runs import assert_nothing_twice, ledger, records, uses
from tests.learner.live.tiny import make_config, mesh_of, run_learner

ALGORITHM = """
from rollmesh.learner.algorithms.interface import Batch
from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient


class Watching(PolicyGradient):
    def batch_stage(self, batch: Batch) -> None:
        chances = batch.rollouts.probabilities
        assert chances is not None and bool(((chances > 0) & (chances <= 1)).all())
        batch.report({"seen/probability": float(chances.mean())})
        super().batch_stage(batch)
"""


def half_of_reward_std(group: Group) -> float:
    """A priority of one's own."""
    return reward_std(group) / 2


def test_groups_are_trained_up_to_the_limit_by_priorities(tmp_path: Path) -> None:
    (tmp_path / "watching.py").write_text(ALGORITHM, encoding="utf-8")
    config = make_config(
        tmp_path,
        {
            "learner.steps": 8,
            "data.eval": None,
            "algorithm.name": f"{tmp_path / 'watching.py'}:Watching",
            "buffer.order": "priority",
            "buffer.priority": f"{Path(__file__)}:half_of_reward_std",
            "buffer.max_reuse": 3,
            "buffer.max_staleness": 3,
        },
    )
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
        counts = ledger(mesh).recounted
    assert counts.uses + counts.trained > 0
    logged = [group for use in uses(config) for group in use.groups]
    assert len(logged) == 8 * 4
    per_group = Counter(group.group_id for group in logged)
    assert 1 < max(per_group.values()) <= 3
    assert counts.admitted < 8 * 4, "fewer groups were generated than trained"
    for group_id, times in per_group.items():
        assert sorted(group.use for group in logged if group.group_id == group_id) == list(range(1, times + 1))
    assert_nothing_twice(config)
    steps = [r for r in records(config) if "seen/probability" in r]
    assert len(steps) == 8
    assert max(r["staleness/max"] for r in steps) <= 3


def test_a_priority_function_that_raises_ends_the_run_before_anything_is_claimed(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def priority(group):\n    return group.no_such_field\n", encoding="utf-8")
    config = make_config(
        tmp_path,
        {
            "data.eval": None,
            "buffer.order": "priority",
            "buffer.priority": f"{tmp_path / 'wrong.py'}:priority",
            "buffer.max_reuse": 2,
            "buffer.max_staleness": 2,
        },
    )
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == ConfigError.exit_code
        counts = ledger(mesh).recounted
    assert (counts.uses, counts.consumed, counts.trained) == (0, 0, 0)
    assert uses(config) == []
