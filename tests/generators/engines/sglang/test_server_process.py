"""Processes that are started for a server: however one of them ends, the others do too, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil
import pytest

from rollmesh.generators.engine_watch import FrozenEngineError, watch
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.external.engine import ExternalEngine
from rollmesh.generators.engines.sglang import load_monitor
from rollmesh.generators.engines.sglang.server_process import ServerProcess, free_port
from rollmesh.generators.engines.types import EngineSettings, SleepLevel, WakeStep
from rollmesh.mesh.config.rollout import SglangSection
from rollmesh.mesh.liveness.process_ends import survivors
from tests.generators.engines.collector import Collector
from tests.generators.engines.harness import V1, V2
from tests.generators.engines.tiny import ContractModel
from tests.repository import REPOSITORY

_STAND_IN = Path(__file__).with_name("stand_in.py")
_DEADLINE_S = 60.0
# In a command that stands for an interpreter: it is to run the watchdog, and not the server.
_IS_WATCHDOG = 'test "${1##*/}" = server_watchdog.py'

# A server with a child of its own, both with memory that they share.
_SERVER = """
import mmap, os, signal, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    shared = mmap.mmap(file.fileno(), 4096)
child = os.fork()
if child:
    print("out of \\x1b[1;33mluck\\x1b[0m", os.getpid(), child, flush=True)
signal.pause()
"""
_GENERATOR = """
import asyncio, sys
from rollmesh.generators.engines.sglang.server_process import ServerProcess

async def main():
    process = ServerProcess()
    await process.start(sys.argv[1:], {})
    while len(process.tail().split()) < 5:
        await asyncio.sleep(0.01)
    print(process.scratch, *process.tail().split()[-2:], flush=True)
    await process.until_dead()
    await process.stop()

asyncio.run(main())
"""


@pytest.fixture
def shared() -> Path:
    return Path("/dev/shm") / f"rollmesh-test-{uuid.uuid4().hex}"  # where the kernel has it


def _gone(pids: list[int]) -> None:
    assert survivors(pids, _DEADLINE_S) == set()


def test_a_server_that_dies_is_told_of_and_takes_its_children_along(shared: Path) -> None:
    async def run() -> None:
        process = ServerProcess()
        await process.start([sys.executable, "-c", _SERVER, str(shared)], {})
        while len(process.tail().split()) < 5:
            await asyncio.sleep(0.01)
        server, child = map(int, process.tail().split()[-2:])
        os.kill(server, signal.SIGKILL)
        told = await asyncio.wait_for(process.until_dead(), _DEADLINE_S)
        assert "killed by SIGKILL" in told
        assert "out of luck" in told
        _gone([server, child])
        assert not shared.exists()
        assert process.scratch.exists(), "its log is there until it is stopped"
        await process.stop()
        assert not process.scratch.exists()
        await process.stop()

    asyncio.run(run())


@pytest.mark.parametrize("killed", ["generator", "watchdog"])
def test_a_server_ends_with_its_generator_or_watchdog(killed: str, shared: Path) -> None:
    generator = subprocess.Popen(
        [sys.executable, "-c", _GENERATOR, sys.executable, "-c", _SERVER, str(shared)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        assert generator.stdout is not None
        scratch, *found = generator.stdout.readline().split()
        pids = [int(pid) for pid in found]
        [watchdog] = psutil.Process(generator.pid).children()
        if killed == "watchdog":
            watchdog.kill()
            # The kernel ends the server itself; no process is left for more.
            _gone(pids[:1])
            os.kill(pids[1], signal.SIGKILL)
            shared.unlink()
            generator.communicate(timeout=_DEADLINE_S)
            assert not Path(scratch).exists()
        else:
            generator.kill()
            _gone([watchdog.pid, *pids])
            assert not shared.exists()
            assert not Path(scratch).exists()
    finally:
        generator.kill()
        generator.communicate()


@contextmanager
def _engine(
    contract_model: ContractModel, section: SglangSection, release: Literal["memory", "process"] = "memory"
) -> Iterator[ExternalEngine]:
    """Its listener is a `Collector`."""
    settings = EngineSettings(context=200, release=release, sglang=section)
    engine = create_engine("sglang", contract_model.folder, settings, Collector(_DEADLINE_S))
    assert isinstance(engine, ExternalEngine)
    engine.start()
    try:
        engine._inflight.wait_until_up()
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Runs a server that stands for SGLang."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n{_IS_WATCHDOG} && exec {sys.executable} "$@"\nexec {sys.executable} {_STAND_IN} "$@"\n'
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def engine(contract_model: ContractModel, python: Path) -> Iterator[ExternalEngine]:
    """With a server of its own."""
    section = SglangSection(python=python, options={"log-level": "error"})
    with _engine(contract_model, section) as engine:
        yield engine


def test_a_server_ends_for_a_sleep_and_another_one_gets_the_next_weights(
    contract_model: ContractModel, python: Path
) -> None:
    with _engine(contract_model, SglangSection(python=python, transfer="disk"), release="process") as engine:
        engine.update_weights(V1, contract_model.constant_weights(10).items(), "1").result(_DEADLINE_S)
        first = [process.pid for process in _processes()]
        assert engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(_DEADLINE_S).freed_bytes > 0
        _gone(first)
        assert engine.process_state() is None
        engine.wake(WakeStep.WEIGHTS).result(_DEADLINE_S)
        assert not {process.pid for process in _processes()} & set(first)
        engine.update_weights(V2, contract_model.constant_weights(11).items(), "2").result(_DEADLINE_S)
        assert engine.status().serving == V2


def _processes() -> tuple[psutil.Process, psutil.Process]:
    """Keeper and server of the only engine that this process has."""
    [watchdog] = [child for child in psutil.Process().children() if "server_watchdog.py" in " ".join(child.cmdline())]
    [server] = watchdog.children()
    return watchdog, server


def test_the_death_of_a_server_is_the_end_of_its_engine(engine: ExternalEngine) -> None:
    watchdog, server = _processes()
    server.kill()
    collector = engine._thread._listener
    assert isinstance(collector, Collector)
    assert "the SGLang server has died (killed by SIGKILL)" in str(collector.wait_failure())
    engine.stop()
    _gone([watchdog.pid])


def test_a_server_that_is_killed_in_its_start_is_told_by_its_signal(
    contract_model: ContractModel, tmp_path: Path
) -> None:
    """It has written no log, and no option is to blame."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n{_IS_WATCHDOG} && exec {sys.executable} "$@"\nkill -KILL $$\n')
    python.chmod(0o755)
    collector = Collector(_DEADLINE_S)
    settings = EngineSettings(context=200, sglang=SglangSection(python=python))
    engine = create_engine("sglang", contract_model.folder, settings, collector)
    engine.start()
    failure = str(collector.wait_failure())
    engine.stop()
    assert "the SGLang server has died (killed by SIGKILL) (" in failure
    assert "OOM killer" in failure
    assert "log" not in failure
    assert "options" not in failure


def test_a_server_that_is_stopped_is_found_and_nothing_is_left(engine: ExternalEngine) -> None:
    watchdog, server = _processes()
    server.suspend()
    with pytest.raises(FrozenEngineError, match="stopped by a signal"):
        asyncio.run(asyncio.wait_for(watch(engine, 0.1), _DEADLINE_S))
    engine.stop()
    _gone([watchdog.pid, server.pid])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor for which a server is soon silent."""
    monkeypatch.setattr(load_monitor, "_EVERY_S", 0.01)
    monkeypatch.setattr(load_monitor, "_ANSWER_S", 0.3)


@pytest.mark.usefixtures("hasty")
def test_a_server_of_our_own_is_not_judged_by_the_clock(
    engine: ExternalEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A step may take minutes; what its processes do says whether it is frozen."""
    _, server = _processes()
    server.suspend()
    until = time.monotonic() + _DEADLINE_S
    while caplog.text.count("does not report its load") < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert caplog.text.count("does not report its load") >= 5
    server.resume()
    engine.ping().result(_DEADLINE_S)
    assert engine.status().failure is None


@pytest.mark.usefixtures("hasty")
def test_a_foreign_server_that_is_silent_ends_the_engine(contract_model: ContractModel) -> None:
    port = free_port()
    server = subprocess.Popen([sys.executable, str(_STAND_IN), "--port", str(port)], cwd=REPOSITORY)
    try:
        section = SglangSection(address=f"http://127.0.0.1:{port}", transfer="disk")
        with _engine(contract_model, section) as engine:
            server.send_signal(signal.SIGSTOP)
            collector = engine._thread._listener
            assert isinstance(collector, Collector)
            assert "does not answer" in str(collector.wait_failure())
    finally:
        server.kill()
        server.wait()


def test_who_took_the_port_of_a_server_does_not_get_its_key(
    contract_model: ContractModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port stands in command lines, which all users can read, long before the server binds it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n{_IS_WATCHDOG} && exec {sys.executable} "$@"\nexec sleep {_DEADLINE_S}\n')
    python.chmod(0o755)
    collector = Collector(_DEADLINE_S)
    section = SglangSection(python=python, start_timeout_s=5.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr("rollmesh.generators.engines.sglang.server.free_port", lambda: port)
        engine = create_engine("sglang", contract_model.folder, EngineSettings(context=200, sglang=section), collector)
        engine.start()
        assert f"port {port} of 127.0.0.1 is in use by another process" in str(collector.wait_failure())
        engine.stop()
        other.settimeout(_DEADLINE_S)
        connection, _ = other.accept()
        with connection:
            assert connection.recv(1) == b""
