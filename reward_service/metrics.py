"""Prometheus metrics of the reward service, in a registry of their own (several servers may share a process)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protos import reward_pb2
from reward_service.workers.pool import PoolStats

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class RewardMetrics:
    """Counts calls and items by outcome; `code` is the error's, empty otherwise."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._items = Counter("rollmesh_reward_items", "Items answered.", ["outcome", "code"], registry=self.registry)
        self._seconds = Histogram(
            "rollmesh_reward_call_seconds", "Duration of Score calls.", buckets=_SECONDS, registry=self.registry
        )
        self._hanging = Gauge(
            "rollmesh_reward_hanging_threads", "Threads given up because a call hangs.", registry=self.registry
        )
        self._workers = Gauge("rollmesh_reward_workers", "Worker processes.", registry=self.registry)
        self._ended = Gauge(
            "rollmesh_reward_workers_ended", "Worker processes lost since the start.", ["why"], registry=self.registry
        )
        self._totals = dict.fromkeys(("items", "errors", "calls", "hanging_threads", "workers_ended"), 0.0)

    def record(
        self, results: Sequence[reward_pb2.ScoreResult], seconds: float, workers: PoolStats, *, hanging_threads: int
    ) -> None:
        """Counts one answered call, and notes how those stand who answer."""
        counts: dict[tuple[str, str], int] = {}
        for result in results:
            outcome = result.WhichOneof("outcome") or "none"
            key = (outcome, result.error.code if outcome == "error" else "")
            counts[key] = counts.get(key, 0) + 1
        for (outcome, code), count in counts.items():
            self._items.labels(outcome, code).inc(count)
            if outcome == "error":
                self._totals["errors"] += count
        self._seconds.observe(seconds)
        self._hanging.set(hanging_threads)
        self._workers.set(workers.workers)
        self._ended.labels("overdue").set(workers.overdue)
        self._ended.labels("died").set(workers.died)
        self._totals["items"] += len(results)
        self._totals["calls"] += 1
        self._totals["hanging_threads"] = hanging_threads
        self._totals["workers_ended"] = workers.overdue + workers.died

    def gauges(self) -> Mapping[str, float]:
        """Figures for heartbeats."""
        return {f"reward_{name}": value for name, value in self._totals.items()}
