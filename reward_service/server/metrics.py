"""Prometheus metrics of the reward service, in a registry of their own (several servers may share a process).

Answers are counted here. The state of workers is read at each scrape, since nothing is answered while all of them hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.outcomes import NOT_BEGUN
from rollmesh.reward_service.scoring.engine import ScoringEngine

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class WorkerCollector(Collector):
    """State of the workers and threads that score, read at each scrape."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        stats = self._engine.workers
        yield GaugeMetricFamily("rollmesh_reward_workers", "Worker processes.", stats.workers)
        busy = "Seconds in which workers had calls, of all together; over workers it is the share of their time."
        yield CounterMetricFamily("rollmesh_reward_busy_seconds", busy, stats.busy_s)
        ended = CounterMetricFamily("rollmesh_reward_workers_ended", "Worker processes lost.", labels=["why"])
        ended.add_metric(["overdue"], stats.overdue)
        ended.add_metric(["died"], stats.died)
        yield ended
        yield GaugeMetricFamily(
            "rollmesh_reward_hanging_threads",
            "Threads abandoned because a call hangs.",
            self._engine.hanging_threads,
        )


class RewardMetrics:
    """Counts calls and items by outcome; `code` is the error's, empty otherwise.

    Args:
        engine: what answers.
    """

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self.registry = CollectorRegistry()
        self._items = Counter("rollmesh_reward_items", "Items answered.", ["outcome", "code"], registry=self.registry)
        self._seconds = Histogram(
            "rollmesh_reward_call_seconds", "Duration of Score calls.", buckets=_SECONDS, registry=self.registry
        )
        self.registry.register(WorkerCollector(engine))
        self._totals = dict.fromkeys(("items", "errors", "calls"), 0.0)

    def record(self, results: Sequence[reward_pb2.ScoreResult], seconds: float) -> None:
        """Counts one answered call."""
        counts: dict[tuple[str, str], int] = {}
        for result in results:
            outcome = result.WhichOneof("outcome") or "none"
            key = (outcome, result.error.code if outcome == "error" else "")
            counts[key] = counts.get(key, 0) + 1
        for (outcome, code), count in counts.items():
            self._items.labels(outcome, code).inc(count)
            if outcome == "error" and code != NOT_BEGUN:
                self._totals["errors"] += count
        self._seconds.observe(seconds)
        self._totals["items"] += len(results)
        self._totals["calls"] += 1

    def gauges(self) -> Mapping[str, float]:
        """Values for heartbeats."""
        stats = self._engine.workers
        now = {
            **self._totals,
            "workers": float(stats.workers),
            "busy_seconds": stats.busy_s,
            "hanging_threads": float(self._engine.hanging_threads),
            "workers_ended": float(stats.overdue + stats.died),
        }
        return {f"reward_{name}": value for name, value in now.items()}
