"""The metrics of the reward service, as they are scraped."""

from __future__ import annotations

from typing import cast

import pytest

from rollmesh.mesh.config.scorers.cache import CacheSection
from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.cache.cache import CacheStats, ScoreCache
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.judge.budget import Usage
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.metrics import RewardMetrics
from rollmesh.reward_service.workers.pool import PoolStats


class FakeEngine:
    """The part of an engine that the metrics read."""

    workers = PoolStats()
    hanging_threads = 0
    judge: Accounts | None = None
    cache: ScoreCache | None = None


def test_lost_workers_are_told_while_nothing_is_answered() -> None:
    engine = FakeEngine()
    metrics = RewardMetrics(cast("ScoringEngine", engine), rung=3)

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
    assert gauges["reward_isolation_rung"] == value("isolation_rung") == 3


def test_a_judge_shows_its_requests_and_their_cost() -> None:
    engine = FakeEngine()
    engine.judge = accounts = Accounts(JudgeSection(prompt_price=2.0, answer_price=10.0))
    metrics = RewardMetrics(cast("ScoringEngine", engine))
    accounts.reserve(Usage(100, 50))
    accounts.settle(Usage(100, 50), Usage(80, 20))
    accounts.counts.answers["verdict"] += 1

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"rollmesh_reward_judge_{name}", labels)

    assert value("answers_total", outcome="verdict") == 1
    assert value("tokens_total", kind="prompt") == 80
    assert value("cost_total") == pytest.approx(0.00036)
    assert value("share") == 1.0


def test_the_hit_rate_is_told() -> None:
    engine = FakeEngine()
    metrics = RewardMetrics(cast("ScoringEngine", engine))
    assert "reward_cache_hits" not in metrics.gauges()
    engine.cache = ScoreCache(CacheSection())
    engine.cache.stats = CacheStats(memory=5, redis=2, joined=1, missed=4)
    engine.cache.memory.put(b"key", b"value")

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"rollmesh_reward_cache_{name}", labels)

    assert [value("lookups_total", result=result) for result in ("memory", "redis", "joined", "missed")] == [5, 2, 1, 4]
    assert value("scores") == 1
    assert value("bytes") == engine.cache.memory.bytes > 8
    assert value("redis_failures_total") is None
    assert (metrics.gauges()["reward_cache_hits"], metrics.gauges()["reward_cache_lookups"]) == (8, 12)


def test_codes_of_errors_without_end_are_few_series() -> None:
    metrics = RewardMetrics(cast("ScoringEngine", FakeEngine()))
    for number in range(500):
        error = reward_pb2.Error(code=f"code {number}")
        metrics.record_results([reward_pb2.ScoreResult(item_id="a", error=error)])
    samples = [sample for metric in metrics.registry.collect() for sample in metric.samples]
    counted = {s.labels["code"]: s.value for s in samples if s.name == "rollmesh_reward_items_total"}
    assert len(counted) <= 65
    assert sum(counted.values()) == 500
    assert counted["other"] >= 435
