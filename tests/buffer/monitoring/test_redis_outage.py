"""A Redis that is away is told of now and then, and when it is back."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import psutil
import pytest

from rollmesh.buffer.monitoring.redis_outage import AGAIN_S, RedisOutage
from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.launcher.mesh_client import MeshClient
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import StoreError
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh, make_config

GONE = StoreError("Redis is unreachable: connection refused", hint="is it running?")
FULL = StoreError("Redis refuses writes: OOM")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "rollmesh.buffer.monitoring.redis_outage"
    ]


def test_a_cause_is_told_once_in_a_while_whoever_meets_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rollmesh.buffer.monitoring.redis_outage")
    now = 100.0
    outage = RedisOutage(clock=lambda: now)
    for _ in range(10):
        outage.job_failed("sweep", GONE)
        outage.job_failed("listening", StoreError("Redis is unreachable: connection reset"))
        outage.report("detaching a stream", GONE)
    outage.job_failed("evicting", FULL)
    now += AGAIN_S + 1
    outage.job_failed("listening", GONE)
    outage.job_failed("sweep", GONE)
    for job in ("sweep", "evicting", "listening", "listening", "never failed"):
        outage.job_passed(job)
    outage.job_failed("sweep", GONE)
    assert told(caplog) == [
        f"sweep: {GONE}",
        f"evicting: {FULL}",
        f"listening: {GONE}, for 11 s now",
        "Redis works again, after 11 s",
        f"sweep: {GONE}",
    ]


async def test_a_front_without_its_redis_says_so_once_and_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollmesh.buffer.monitoring.redis_outage")
    server = EmbeddedRedis(tmp_path / "redis", durability="none")
    await server.start()
    mesh = Mesh(server.url, tmp_path)
    try:
        front = await mesh.front(make_config(tmp_path, server.url))
        assert front.metrics is not None
        tries, jobs = asyncio.Semaphore(0), set()

        class Counted(RedisOutage):
            def job_failed(self, job: str, error: StoreError) -> None:
                super().job_failed(job, error)
                jobs.add(job)
                tries.release()

        front.metrics.front.outage = Counted(clock=lambda: 0.0)
        await server.stop()
        async with asyncio.timeout(TIMEOUT_S):
            while len(jobs) < 4:
                await tries.acquire()
        await server.start()
        async with asyncio.timeout(TIMEOUT_S):
            while not told(caplog)[-1].startswith("Redis works again"):
                await asyncio.sleep(0.02)
        assert len(told(caplog)) <= 3, "one per cause: unreachable, or cut off in the middle"
    finally:
        await mesh.close()
        await server.stop()


async def test_who_looks_at_a_run_hears_that_its_redis_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the deadline of the look is over: after it, there would be no more than that to say."""
    monkeypatch.setattr("rollmesh.launcher.mesh_client._DEADLINE_S", 30.0)
    monkeypatch.setattr("rollmesh.buffer.monitoring.bounded_answers._SHARE", 0.05)
    server = EmbeddedRedis(tmp_path / "redis", durability="none")
    await server.start()
    mesh = Mesh(server.url, tmp_path)
    try:
        front = await mesh.front(make_config(tmp_path, server.url))
        psutil.Process(server.pid).suspend()
        async with MeshClient(front.address, SecuritySection()) as view:
            with pytest.raises(StoreError, match=r"the front is there, but its Redis has not answered for \d\.\d s"):
                await view.read_snapshot()
    finally:
        psutil.Process(server.pid).send_signal(signal.SIGCONT)
        await mesh.close()
        await server.stop()
