"""vLLM's own load metrics, through a stat logger."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from rollmesh.generators.engines.external.backend import LoadMetrics


class LoadMetricsCollector:
    """Keeps the newest metrics of each engine core; any thread may read them."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, int, float]] = {}
        self._preemptions = 0

    def create(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """Creates the logger of an engine core; called by vLLM."""
        return _Recorder(self, vllm_config, engine_index)

    def record(self, engine: int, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Records one step of one core."""
        if scheduler is not None:
            self._latest[engine] = (
                scheduler.num_running_reqs,
                scheduler.num_waiting_reqs,
                scheduler.kv_cache_usage,
            )
        if iteration is not None:
            self._preemptions += iteration.num_preempted_reqs

    def preempted(self, count: int) -> None:
        """Counts preempted jobs for which vLLM makes no statistics."""
        self._preemptions += count

    def current(self) -> LoadMetrics:
        """Metrics of all cores together; the use of the KV cache is that of the fullest."""
        latest = list(self._latest.values())
        return LoadMetrics(
            running=sum(row[0] for row in latest),
            waiting=sum(row[1] for row in latest),
            kv_usage=max((row[2] for row in latest), default=0.0),
            preemptions=self._preemptions,
        )


class _Recorder(StatLoggerBase):
    def __init__(self, metrics: LoadMetricsCollector, vllm_config: VllmConfig, engine_index: int = 0) -> None:  # noqa: ARG002
        self._metrics = metrics
        self._engine = engine_index

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        self._metrics.record(self._engine, scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Does nothing: only the metrics of steps are recorded."""
