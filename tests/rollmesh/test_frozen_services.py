"""Services that live and do not answer are killed and started again; services that are busy never."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rollmesh.launcher.errors import ServiceExitError
from rollmesh.launcher.health import HealthProbe
from rollmesh.launcher.service_process import ServiceSpec, ready_file
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.liveness import watchdog
from rollmesh.mesh.liveness.freeze_detector import ProcessState, ThreadState
from rollmesh.mesh.liveness.process_state import read_child_process
from rollmesh.mesh.liveness.watchdog import ProbeAnswer
from rollmesh.report.restarts import read_restarts
from tests.rollmesh.conftest import Recorder
from tests.rollmesh.fake_spec import FAKE, fake_spec
from tests.rollmesh.test_supervisor import DEADLINE_S, ended, gone, started, until

pytestmark = pytest.mark.slow
MakeSupervisor = Callable[..., Supervisor]
NAME = "reward"


@pytest.fixture(autouse=True)
def ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for the next question to a service."""
    monkeypatch.setattr(watchdog, "ASK_EVERY_S", 0.05)


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """More busy loops than this machine has cores, by far; each in a session, which is what the kernel is fair to."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(16)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize(
    ("number", "seen"),
    [
        (signal.SIGSTOP, r"reward: frozen (stopped by a signal for 1 s), killed"),
        (signal.SIGUSR1, r"reward: frozen (ran for 1 s of processor time and answered nothing"),
        (signal.SIGUSR2, r"reward: frozen (asleep, and answered nothing"),
    ],
    ids=["stopped", "holds-its-interpreter", "deadlocked"],
)
async def test_a_frozen_service_is_killed_and_started_again(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder, number: signal.Signals, seen: str
) -> None:
    supervisor = make_supervisor(frozen_after_s=1.0)
    running = await started(supervisor, recorder, fake_spec(tmp_path, NAME))
    first = supervisor.pids()[NAME]
    os.kill(first, number)
    await until(lambda: recorder.starts_of(NAME) == 2, running)
    assert gone(first)
    assert [event for event in recorder.events if event.startswith(seen)], recorder.events
    assert read_restarts(tmp_path) == {NAME: {"frozen": 1}}
    await ended(supervisor, running)


async def test_freezing_again_and_again_ends_the_run(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    supervisor = make_supervisor(frozen_after_s=1.0, max_restarts=0)
    running = await started(supervisor, recorder, fake_spec(tmp_path, NAME, "--log", "boom"))
    os.kill(supervisor.pids()[NAME], signal.SIGSTOP)
    with pytest.raises(ServiceExitError, match=r"reward: hung more than 0 times within a day; last: frozen \(stopped"):
        await asyncio.wait_for(running, DEADLINE_S)
    assert recorder.tails[NAME] == ["boom"]


async def test_a_service_that_continues_in_time_is_left_alone(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped for longer than the bound in all, but never at a time; a look counts for a quarter of the bound."""
    events: list[str] = []

    def read(pid: int) -> ProcessState | None:
        state = read_child_process(pid)
        if state is not None and state.state is ThreadState.STOPPED:
            events.append("looked")
        return state

    async def ask(probe: HealthProbe) -> ProbeAnswer:
        answer = await ask_once(probe)
        events.append("answered")
        return answer

    ask_once = HealthProbe.ask
    monkeypatch.setattr(HealthProbe, "ask", ask)
    monkeypatch.setattr("rollmesh.launcher.service_process.read_child_process", read)
    supervisor = make_supervisor(frozen_after_s=2.0)
    running = await started(supervisor, recorder, fake_spec(tmp_path, NAME))
    service = psutil.Process(supervisor.pids()[NAME])
    for _ in range(3):
        events.clear()
        service.suspend()
        await until(lambda: events.count("looked") >= 2, running)
        service.resume()
        await until(lambda: "answered" in events[events.index("looked") :], running)
    assert supervisor.pids() == {NAME: service.pid}
    await ended(supervisor, running)
    assert read_restarts(tmp_path) == {}


async def test_a_busy_service_on_a_busy_machine_is_never_killed(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that compute under one interpreter lock, busy loops next to them, and next to no share."""
    looks: list[int] = []

    def read(pid: int) -> ProcessState | None:
        looks.append(pid)
        return read_child_process(pid)

    monkeypatch.setattr("rollmesh.launcher.service_process.read_child_process", read)
    supervisor = make_supervisor(frozen_after_s=0.5)
    running = await started(supervisor, recorder, fake_spec(tmp_path, NAME, "--spin", "2"))
    pid = supervisor.pids()[NAME]
    with busy_machine():
        # That of a process group is the one of main threads alone.
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), 19)
        with contextlib.suppress(FileNotFoundError):
            Path(f"/proc/{pid}/autogroup").write_text("19")
        looks.clear()
        # Twice the bound, where it is silent all the time; a watcher that gets no processor looks less often.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while len(looks) < 8 and supervisor.pids() == {NAME: pid}:
                    await asyncio.sleep(0.02)
        assert supervisor.pids() == {NAME: pid}, recorder.events
    assert read_restarts(tmp_path) == {}
    supervisor.interrupt()
    await ended(supervisor, running)


async def test_what_a_stopped_service_has_started_does_not_stay_stopped(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    """A child in a session of its own (Redis) is asked to end when its parent dies, and can hear it."""
    note = tmp_path / "child.pid"
    supervisor = make_supervisor(frozen_after_s=1.0)
    spec = fake_spec(tmp_path, NAME, "--child", str(note), "--own-session")
    running = await started(supervisor, recorder, spec)
    child = psutil.Process(int(note.read_text()))
    child.suspend()
    os.kill(supervisor.pids()[NAME], signal.SIGSTOP)
    await until(lambda: recorder.starts_of(NAME) == 2, running)
    await until(lambda: gone(child.pid), running)
    await ended(supervisor, running)


async def test_a_frozen_service_does_not_hold_up_the_end(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    """Long before its time to end in order is over."""
    supervisor = make_supervisor(frozen_after_s=1.0)
    running = await started(supervisor, recorder, fake_spec(tmp_path, NAME, drain_s=3600.0))
    os.kill(supervisor.pids()[NAME], signal.SIGSTOP)
    await ended(supervisor, running)


async def test_silence_is_no_failure_where_it_is_said_so(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    supervisor = make_supervisor(frozen_after_s=0.0)
    running = await started(supervisor, recorder, fake_spec(tmp_path, NAME, drain_s=0.5))
    os.kill(supervisor.pids()[NAME], signal.SIGSTOP)
    await ended(supervisor, running)
    assert read_restarts(tmp_path) == {}


async def test_a_part_that_has_ended_without_its_service_is_found(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    """A rank whose starter does not report it, being stopped itself."""
    ready = ready_file(tmp_path, NAME)
    starter = (
        "import subprocess, sys; parts = [subprocess.Popen([sys.executable, sys.argv[1], path]) for path in "
        "sys.argv[2:]]; parts[0].wait()"
    )
    command = [sys.executable, "-c", starter, str(FAKE), str(ready), str(ready_file(tmp_path, f"{NAME}-1"))]
    spec = ServiceSpec(NAME, lambda _restart: command, {}, drain_s=1.0, parts=(f"{NAME}-1",))
    supervisor = make_supervisor(frozen_after_s=1.0)
    running = await started(supervisor, recorder, spec)
    os.kill(json.loads(ready_file(tmp_path, f"{NAME}-1").read_text())["pid"], signal.SIGKILL)
    await until(lambda: recorder.starts_of(NAME) == 2, running)
    assert [event for event in recorder.events if event.startswith("reward: reward-1 frozen (has ended")]
    await ended(supervisor, running)


async def test_a_service_that_cannot_be_watched_ends_the_run(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("rollmesh.launcher.service_process.ServiceProcess.wait_until_frozen", breaks)
    running = await started(make_supervisor(), recorder, fake_spec(tmp_path, NAME))
    with pytest.raises(RollmeshError, match="reward cannot be supervised: ValueError"):
        await asyncio.wait_for(running, DEADLINE_S)
