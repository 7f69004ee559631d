"""A service that loads for longer than it may take to answer: waited for while it lives, ended where it is frozen."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.launcher.loading import Loading, report_loading
from rollmesh.launcher.service_process import ServiceSpec, ready_file
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.mesh.errors import UnreachableError
from rollmesh.report.restarts import read_restarts
from tests.rollmesh.conftest import Recorder
from tests.rollmesh.fake_spec import fake_spec
from tests.rollmesh.test_supervisor import DEADLINE_S, ended, same_rank, until

MakeSupervisor = Callable[..., Supervisor]
NAME = "learner"


def loading_spec(folder: Path, loads: Path, most_s: float = math.inf) -> ServiceSpec:
    first = ready_file(folder, f"{NAME}-0")
    spec = fake_spec(folder, NAME, "--answers-first", str(first), "--loads", str(loads))
    return replace(spec, start_deadline_s=DEADLINE_S, loading=Loading(f"{NAME}-0", most_s))


async def started(supervisor: Supervisor, spec: ServiceSpec, folder: Path) -> asyncio.Task[None]:
    running = asyncio.create_task(supervisor.run([lambda: [spec]], same_rank))
    await until(ready_file(folder, f"{NAME}-0").exists)
    return running


async def test_it_may_load_for_longer_than_its_start_may_take(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, loop = tmp_path / "loads", asyncio.get_running_loop()
    supervisor = make_supervisor(frozen_after_s=1.0)
    running = await started(supervisor, loading_spec(tmp_path, loads), tmp_path)
    asked = asyncio.Event()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + 100 * DEADLINE_S)
    # Waits that begin now are of the new clock: the service's own has passed its deadline by far.
    loop.call_later(1.0, asked.set)
    await asked.wait()
    loads.touch()
    await until(lambda: recorder.starts_of(NAME) == 1)
    assert read_restarts(tmp_path) == {}
    await ended(supervisor, running)


async def test_one_that_is_frozen_while_it_loads_is_started_again(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    loads = tmp_path / "loads"
    supervisor = make_supervisor(frozen_after_s=1.0)
    running = await started(supervisor, loading_spec(tmp_path, loads), tmp_path)
    os.kill(supervisor.pids()[NAME], signal.SIGSTOP)
    await until(lambda: bool(read_restarts(tmp_path)))
    assert read_restarts(tmp_path) == {NAME: {"frozen": 1}}
    loads.touch()
    await until(lambda: recorder.starts_of(NAME) == 1)
    await ended(supervisor, running)


async def test_its_limit_names_the_key(tmp_path: Path, make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(max_restarts=0)
    spec = loading_spec(tmp_path, tmp_path / "never", most_s=0.2)
    with pytest.raises(UnreachableError, match="not ready within") as ended:
        await asyncio.wait_for(supervisor.run([lambda: [spec]], same_rank), DEADLINE_S)
    assert "buffer.stall_limit_s" in ended.value.hint


async def test_a_long_load_is_told() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    reporting = asyncio.create_task(report_loading(NAME, 1800.0, told.put_nowait, 0.01))
    text = await asyncio.wait_for(told.get(), DEADLINE_S)
    reporting.cancel()
    assert text.startswith("learner has loaded models for 0 s, at most 1800 s (buffer.stall_limit_s)")


@pytest.mark.parametrize(("limit_s", "most_s"), [(1800.0, 1800.0), (10.0, 600.0), (0.0, math.inf)])
def test_a_learner_loads_as_long_as_a_run_may_make_no_progress(limit_s: float, most_s: float) -> None:
    assert Loading.of_learner("learner-0", limit_s).most_s == most_s
