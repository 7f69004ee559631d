"""Nothing is left of many runs. Apart from other tests, whose executors would come and go in the same process."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import psutil
import pytest

from rollmesh.reward_service.sandbox import executor
from rollmesh.reward_service.sandbox.interface import Job, Limits, Ran
from tests.reward_service.sandbox.conftest import opened

LIMITS = Limits(cpu_s=60.0, wall_s=120.0)


def _held() -> tuple[int, set[int]]:
    """Number of open descriptors, and the child processes."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), {each.pid for each in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("rung", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
async def test_many_runs_leave_nothing(rung: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files, processes = _held()
    monkeypatch.setattr(executor, "_SHARE", 30)
    sandbox = await opened(rung)
    jobs = [Job("python", {"main.py": b"print(%d)" % n}, ["main.py"], limits=LIMITS) for n in range(100)]
    ran = await asyncio.gather(*map(sandbox.run, jobs))
    assert [each.stdout for each in ran] == [b"%d\n" % n for n in range(100)]
    folders = [Path(zygote._folder) for zygote in sandbox._idle]
    await sandbox.close()
    assert not [folder for folder in folders if folder.exists()]
    files_after, processes_after = _held()
    # Leavings of earlier tests may end meanwhile.
    assert files_after <= files
    assert processes_after <= processes
    assert (await sandbox.run(jobs[0])) == Ran("infrastructure", reason="the executor is closed")
