"""The metrics that every service has."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry

from rollmesh.mesh.http.process_metrics import process_metrics
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors

log = logging.getLogger(__name__)


async def test_a_blocked_loop_a_failed_task_and_warnings_are_counted() -> None:
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"rollmesh_{name}", labels) or 0.0

    async def fail() -> None:
        raise ValueError("as it happens")

    async with process_metrics(registry):
        failures = value("background_task_failures_total")
        tasks = BackgroundTasks(log_errors(log))
        tasks.spawn(fail())
        await tasks.drain()
        log.warning("look at this")
        async with asyncio.timeout(60):
            while not value("event_loop_lag_seconds_count"):
                await asyncio.sleep(0.05)
        assert value("background_task_failures_total") == failures + 1
        assert (value("log_records_total", level="warning"), value("log_records_total", level="error")) == (1, 1)
    log.warning("after the end")
    assert value("log_records_total", level="warning") == 1
