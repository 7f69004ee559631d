"""Services that are replaced by others while the run continues, with small real processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.launcher.errors import ServiceExitError
from rollmesh.launcher.service_process import ServiceSpec
from rollmesh.launcher.services import drain_order
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.report.restarts import read_restarts
from tests.rollmesh.fake_spec import fake_spec

MakeSupervisor = Callable[..., Supervisor]
DEADLINE_S = 240.0


async def running(supervisor: Supervisor, folder: Path) -> asyncio.Task[None]:
    """A run with a buffer, a learner and a generator, which are up."""
    others = [fake_spec(folder, "learner", completes_run=True), fake_spec(folder, "generator-0")]
    stages = [lambda: [fake_spec(folder, "buffer")], lambda: others]
    task = asyncio.create_task(supervisor.run(stages, drain_order))
    async with asyncio.timeout(DEADLINE_S):
        while len(supervisor.pids()) < 3:
            await asyncio.sleep(0.02)
        await supervisor.until_healthy(["learner", "generator-0"])
    return task


async def test_services_are_replaced_in_order_and_the_rest_continues(
    tmp_path: Path, make_supervisor: MakeSupervisor
) -> None:
    """The learner's end in order does not end the run; a second trial that fails ends only the trial."""
    supervisor = make_supervisor(max_restarts=0)
    run = await running(supervisor, tmp_path)
    before = supervisor.pids()
    specs = [fake_spec(tmp_path, "learner", completes_run=True), fake_spec(tmp_path, "shared-0")]
    async with asyncio.timeout(DEADLINE_S):
        await supervisor.replace(["learner", "generator-0"], specs, drain_order)
    after = supervisor.pids()
    assert set(after) == {"buffer", "learner", "shared-0"}
    assert after["buffer"] == before["buffer"]
    assert after["learner"] != before["learner"]
    assert read_restarts(tmp_path) == {}
    assert not run.done()

    failing = [fake_spec(tmp_path, "learner", completes_run=True), fake_spec(tmp_path, "generator-0", "--exit", "3")]
    with pytest.raises(ServiceExitError, match="generator-0"):
        async with asyncio.timeout(DEADLINE_S):
            await supervisor.replace(["learner", "shared-0"], failing, drain_order)
    assert not run.done()
    good = [fake_spec(tmp_path, "learner", completes_run=True), fake_spec(tmp_path, "generator-0")]
    async with asyncio.timeout(DEADLINE_S):
        await supervisor.replace(["learner", "generator-0"], good, drain_order)
    supervisor.keep()
    assert not run.done()
    supervisor.interrupt()
    await asyncio.wait_for(run, DEADLINE_S)
    assert supervisor.pids() == {}


async def test_a_replacement_that_is_kept_ends_the_run_as_others_do(
    tmp_path: Path, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor(max_restarts=0)
    run = await running(supervisor, tmp_path)
    failing = [fake_spec(tmp_path, "generator-0", "--exit", "3")]
    with pytest.raises(ServiceExitError):
        async with asyncio.timeout(DEADLINE_S):
            await supervisor.replace(["generator-0"], failing, drain_order)
    supervisor.keep()
    with pytest.raises(ServiceExitError, match="generator-0"):
        await asyncio.wait_for(run, DEADLINE_S)
    assert supervisor.pids() == {}


async def test_the_end_of_the_run_ends_a_replacement(tmp_path: Path, make_supervisor: MakeSupervisor) -> None:
    """Asked to end while a replacement is not healthy yet."""
    supervisor = make_supervisor()
    run = await running(supervisor, tmp_path)
    before = supervisor.pids()["generator-0"]
    slow = [ServiceSpec("generator-0", lambda _: [sys.executable, "-c", "import time; time.sleep(600)"], {})]
    replacing = asyncio.create_task(supervisor.replace(["generator-0"], slow, drain_order))
    async with asyncio.timeout(DEADLINE_S):
        while supervisor.pids().get("generator-0", before) == before:
            await asyncio.sleep(0.02)
    supervisor.interrupt()
    await asyncio.wait_for(asyncio.gather(run, replacing), DEADLINE_S)
    assert supervisor.pids() == {}
