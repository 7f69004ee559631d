"""Metrics that every service has: the lag of its event loop, its log, its background tasks, its process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from rollmesh.mesh.runtime.background_tasks import FAILED, FAILURES
from rollmesh.mesh.runtime.log_format import CountingHandler
from rollmesh.mesh.telemetry.metric_spec import SpecFactory
from rollmesh.mesh.telemetry.span_export import SPANS

_OF_ALL = SpecFactory("")
_LAG = _OF_ALL.histogram(
    "event_loop_lag_seconds", "How much later than asked for the event loop wakes, measured four times a second"
)
_LOG = _OF_ALL.counter("log_records", "Lines of the log", "level")
METRICS = (_LAG, _LOG, FAILURES, SPANS)
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_EVERY_S = 0.25
_LEVELS = ("warning", "error", "critical")


@asynccontextmanager
async def process_metrics(registry: CollectorRegistry) -> AsyncIterator[None]:
    """Measures the running process into a registry while the context lasts."""
    lag = _LAG.as_histogram(_BUCKETS, registry)
    records = _LOG.as_counter(registry)
    registry.register(FAILED)
    ProcessCollector(registry=registry)
    handler = _LevelCounter(records)
    logging.getLogger().addHandler(handler)
    measuring = asyncio.create_task(_measure_lag(lag), name="event loop lag")
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


async def _measure_lag(lag: Histogram) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + _EVERY_S
        await asyncio.sleep(_EVERY_S)
        lag.observe(max(0.0, clock() - due))


class _LevelCounter(CountingHandler):
    """Counts records of the levels that ask for attention."""

    def __init__(self, records: Counter) -> None:
        super().__init__(logging.WARNING)
        self._counts = {level: records.labels(level) for level in _LEVELS}

    def emit(self, record: logging.LogRecord) -> None:
        count = self._counts.get(record.levelname.lower())
        if count is not None:
            count.inc()
