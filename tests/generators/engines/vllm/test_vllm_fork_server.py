"""The process that engine cores are forked from: stopped while one should start, and what it keeps from them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from multiprocessing import forkserver
from typing import Any

import pytest

from rollmesh.generators.engines.external.backend import state_of_start
from rollmesh.mesh.liveness.freeze_detector import Bounds, FreezeKind
from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.liveness.watchdog import wait_until_frozen

_DEADLINE_S = 60.0


def _start_process() -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(_DEADLINE_S,))
    process.start()
    return process


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An own one of Python's, so that the session's vLLM keeps its parent."""
    server = vars(forkserver)["ForkServer"]()
    server.set_forkserver_preload([])
    for name, replaced in (
        ("_forkserver", server),
        ("ensure_running", server.ensure_running),
        ("connect_to_new_process", server.connect_to_new_process),
    ):
        monkeypatch.setattr(forkserver, name, replaced)
    server.ensure_running()
    yield server
    os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


async def test_a_fork_server_that_is_stopped_is_found_and_ends_and_another_one_starts(server: Any) -> None:
    from rollmesh.generators.engines.vllm import fork_server
    from rollmesh.generators.engines.vllm.launcher import EngineProcess
    from rollmesh.generators.engines.vllm.load_metrics import LoadMetricsCollector
    from rollmesh.generators.engines.vllm.logs import EngineLog

    launch = EngineProcess({}, LoadMetricsCollector(), _DEADLINE_S, EngineLog())
    launch._build = _start_process  # type: ignore[assignment,method-assign]
    [stopped] = fork_server.pids()
    os.kill(stopped, signal.SIGSTOP)
    starting = asyncio.create_task(launch.start())
    watching = wait_until_frozen(
        lambda: state_of_start(launch.process_state()), asyncio.get_running_loop().create_future, Bounds.of(0.2)
    )
    try:
        verdict = await asyncio.wait_for(watching, _DEADLINE_S)
        assert verdict.kind is FreezeKind.STOPPED
    finally:
        starting.cancel()
        building = launch._building
        await launch.stop()
    assert survivors([stopped]) == set()
    assert building is not None
    assert isinstance(building.exception(), EOFError), "the thread of the start has ended too"
    again = _start_process()
    assert fork_server.pids() != [stopped]
    again.kill()
    again.join()


@pytest.mark.usefixtures("vllm")
def test_engine_cores_do_not_look_for_garbage_in_what_was_imported_for_them() -> None:
    """They would look through all of vLLM, many times at each start and end."""
    asked = """
import gc, sys
imported = {"vllm.v1.engine.core", "rollmesh.generators.engines.vllm.plugin"} <= sys.modules.keys()
from rollmesh.generators.engines.vllm import plugin
plugin.register()
sys.exit(0 if imported and gc.get_freeze_count() > 9 * len(gc.get_objects()) else 1)
"""
    core = multiprocessing.get_context("forkserver").Process(target=exec, args=(asked,))
    core.start()
    core.join(_DEADLINE_S)
    assert core.exitcode == 0
