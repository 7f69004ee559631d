"""The metrics of the reward service, as they are scraped."""

from __future__ import annotations

from typing import cast

from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.metrics import RewardMetrics
from rollmesh.reward_service.workers.pool import PoolStats


class FakeEngine:
    """The part of an engine that the metrics read."""

    workers = PoolStats()
    hanging_threads = 0


def test_lost_workers_are_told_while_nothing_is_answered() -> None:
    engine = FakeEngine()
    metrics = RewardMetrics(cast("ScoringEngine", engine))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"rollmesh_reward_{name}", labels)

    assert value("workers_ended_total", why="overdue") == 0
    engine.workers = PoolStats(workers=3, overdue=2, died=1)
    engine.hanging_threads = 4
    assert value("workers") == 3
    assert value("workers_ended_total", why="overdue") == 2
    assert value("workers_ended_total", why="died") == 1
    assert value("hanging_threads") == 4
    gauges = metrics.gauges()
    assert gauges["reward_workers_ended"] == 3
    assert gauges["reward_hanging_threads"] == 4
