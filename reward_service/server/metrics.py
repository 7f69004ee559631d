"""Prometheus metrics of the reward service, in a registry of their own (several servers may share a process).

Answers are counted here. The state of workers is read at each scrape, since nothing is answered while all of them hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from prometheus_client import CollectorRegistry

from rollmesh.mesh.telemetry.metric_spec import SpecCollector, SpecFactory, Values
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.judge import metrics as judge_metrics
from rollmesh.reward_service.outcomes import NO_FAILURES
from rollmesh.reward_service.scoring.engine import ScoringEngine

_REWARD = SpecFactory("reward")
_ITEMS = _REWARD.counter("items", "Items answered, by outcome, and by the code of an error", "outcome", "code")
_SECONDS = _REWARD.histogram("call_seconds", "Duration of Score and ScoreStream calls")
_OPEN = _REWARD.gauge("items_in_progress", "Items of calls that are not answered yet")
_OF_ENGINE = (
    _REWARD.gauge("workers", "Worker processes"),
    _REWARD.counter("busy_seconds", "Time in which workers had calls, of all together; over workers their share"),
    _REWARD.counter("workers_ended", "Worker processes lost: overdue, died", "why"),
    _REWARD.gauge("isolation_rung", "Rung on which programs of the model run (docs/isolation.md); 0: none are run"),
    _REWARD.gauge("hanging_threads", "Threads abandoned because a call hangs"),
)
_OF_CACHE = (
    _REWARD.counter(
        "cache_lookups",
        "Scores looked for in the cache, by what came of it: memory, redis, joined (an equal item was being scored), "
        "missed (scored, or failed)",
        "result",
    ),
    _REWARD.gauge("cache_bytes", "Bytes of scores in memory"),
    _REWARD.gauge("cache_scores", "Scores in memory"),
    _REWARD.counter("cache_evicted", "Scores that left the memory for others"),
    _REWARD.counter("cache_redis_failures", "Questions to Redis, and writes, that were not answered in time"),
)
METRICS = (_ITEMS, _SECONDS, _OPEN, *_OF_ENGINE, *_OF_CACHE, *judge_metrics.METRICS)
# Different codes of errors: functions may write anything there, and each is a series of its own.
_MOST_CODES = 64
_OTHER = "other"
_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class RewardMetrics:
    """Counts calls and items by outcome; `code` is the error's, empty otherwise. Beyond some codes all are `other`.

    Args:
        engine: what answers.
        rung: on which programs of the model run; 0 where none are run.
    """

    def __init__(self, engine: ScoringEngine, rung: int = 0) -> None:
        self._engine = engine
        self._rung = rung
        self.registry = CollectorRegistry()
        self._items = _ITEMS.as_counter(self.registry)
        self._seconds = _SECONDS.as_histogram(_BUCKETS, self.registry)
        self._open = _OPEN.as_gauge(self.registry)
        self.registry.register(SpecCollector(_OF_ENGINE, self._engine_values))
        if (judge := engine.judge) is not None:
            self.registry.register(SpecCollector(judge_metrics.METRICS, lambda: judge_metrics.values(judge)))
        self.registry.register(SpecCollector(_OF_CACHE, self._cache_values))
        # Items without an error have a series whatever others have.
        self._codes = {""}
        self._totals = dict.fromkeys(("items", "errors", "calls"), 0.0)

    @contextmanager
    def in_progress(self, items: int) -> Iterator[None]:
        """Counts items as open while the context lasts."""
        self.add_open(items)
        try:
            yield
        finally:
            self.add_open(-items)

    def add_open(self, items: int) -> None:
        """Changes the number of open items by `items`."""
        self._open.inc(items)

    def record_call(self, seconds: float) -> None:
        """Counts one ended call."""
        self._seconds.observe(seconds)
        self._totals["calls"] += 1

    def record_results(self, results: Sequence[reward_pb2.ScoreResult]) -> None:
        """Counts answered items."""
        counts: dict[tuple[str, str], int] = {}
        for result in results:
            outcome = result.WhichOneof("outcome") or "none"
            key = (outcome, result.error.code if outcome == "error" else "")
            counts[key] = counts.get(key, 0) + 1
        for (outcome, code), count in counts.items():
            self._items.labels(outcome, self._known(code)).inc(count)
            if outcome == "error" and code not in NO_FAILURES:
                self._totals["errors"] += count
        self._totals["items"] += len(results)

    def _known(self, code: str) -> str:
        if len(self._codes) < _MOST_CODES:
            self._codes.add(code)
        return code if code in self._codes else _OTHER

    def gauges(self) -> Mapping[str, float]:
        """Values for heartbeats."""
        stats = self._engine.workers
        now = {
            **self._totals,
            "workers": float(stats.workers),
            "busy_seconds": stats.busy_s,
            "hanging_threads": float(self._engine.hanging_threads),
            "workers_ended": float(stats.overdue + stats.died),
            "isolation_rung": float(self._rung),
        }
        if (cache := self._engine.cache) is not None:
            now["cache_hits"], now["cache_lookups"] = map(float, (cache.stats.hits, cache.stats.lookups))
        return {f"reward_{name}": value for name, value in now.items()}

    def _engine_values(self) -> Values:
        stats = self._engine.workers
        return {
            "workers": {(): stats.workers},
            "busy_seconds": {(): stats.busy_s},
            "workers_ended": {("overdue",): stats.overdue, ("died",): stats.died},
            "isolation_rung": {(): self._rung},
            "hanging_threads": {(): self._engine.hanging_threads},
        }

    def _cache_values(self) -> Values:
        if (cache := self._engine.cache) is None:
            return {}
        values: dict[str, dict[tuple[str, ...], float]] = {
            "cache_lookups": {(result,): count for result, count in asdict(cache.stats).items()},
            "cache_bytes": {(): cache.memory.bytes},
            "cache_scores": {(): len(cache.memory)},
            "cache_evicted": {(): cache.memory.evicted},
        }
        if cache.redis is not None:
            values["cache_redis_failures"] = {(): cache.redis.failures}
        return values
