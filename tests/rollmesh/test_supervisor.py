"""The supervisor with small real processes: restarts, permanent failures, order of draining, no orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rollmesh.launcher import service_process
from rollmesh.launcher.errors import ServiceExitError
from rollmesh.launcher.final_work import FinalWork, learner_work
from rollmesh.launcher.service_process import ServiceSpec, log_file
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.mesh.errors import RunBusyError, StuckError, UnreachableError
from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.runtime.fork_server import client
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.threads import thread_environment
from rollmesh.report.restarts import read_restarts
from tests.fork_server import environment
from tests.repository import REPOSITORY
from tests.rollmesh.conftest import Recorder
from tests.rollmesh.fake_spec import fake_spec

MakeSupervisor = Callable[..., Supervisor]
DEADLINE_S = 240.0


def same_rank(_name: str) -> int:
    return 0


async def until(condition: Callable[[], bool], running: asyncio.Task[None] | None = None) -> None:
    """Waits for a condition, or for the end of the run that would bring it about."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            if running is not None and running.done():
                running.result()
                raise AssertionError("the run has ended")
            await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    return not survivors([pid])


async def started(supervisor: Supervisor, recorder: Recorder, spec: ServiceSpec) -> asyncio.Task[None]:
    """A run of one service, which is up."""
    running = asyncio.create_task(supervisor.run([lambda: [spec]], same_rank))
    await until(lambda: recorder.starts_of(spec.name) == 1, running)
    return running


async def ended(supervisor: Supervisor, running: asyncio.Task[None]) -> None:
    """Interrupts a run, and waits for its end."""
    supervisor.interrupt()
    await asyncio.wait_for(running, DEADLINE_S)
    assert supervisor.pids() == {}


async def test_run_ends_when_the_completing_service_does(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    supervisor = make_supervisor()
    stages = [
        lambda: [fake_spec(tmp_path, "buffer")],
        lambda: [fake_spec(tmp_path, "learner", "--die-after-ready", "0", completes_run=True)],
    ]
    await asyncio.wait_for(supervisor.run(stages, same_rank), DEADLINE_S)
    assert recorder.starts_of("buffer") == recorder.starts_of("learner") == 1
    assert supervisor.pids() == {}


async def test_killed_service_is_restarted(tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder) -> None:
    supervisor = make_supervisor()
    running = await started(supervisor, recorder, fake_spec(tmp_path, "generator-0"))
    first = supervisor.pids()["generator-0"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: recorder.starts_of("generator-0") == 2, running)
    assert supervisor.pids()["generator-0"] != first
    assert any("killed by signal SIGKILL" in event and "restarting" in event for event in recorder.events)
    assert read_restarts(tmp_path) == {"generator-0": {"exit": 1}}
    await ended(supervisor, running)


async def test_kill9_of_the_fork_server_touches_no_service_and_the_next_one_is_executed(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    with ForkServer.spawn((), environment()) or nullcontext() as fork_server:
        assert fork_server is not None
        spec = replace(fake_spec(tmp_path, "learner"), environment={**thread_environment(1), "RANK": "7"})
        supervisor = make_supervisor(fork_server=fork_server)
        running = await started(supervisor, recorder, spec)
        forked = psutil.Process(supervisor.pids()["learner"])
        assert forked.ppid() == os.getpid()
        assert "RANK" not in forked.environ(), "the kernel shows the server's environment"
        os.kill(fork_server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, fork_server.pid, os.WEXITED | os.WNOWAIT)
        assert supervisor.pids() == {"learner": forked.pid}
        assert forked.is_running()
        forked.kill()
        await until(lambda: recorder.starts_of("learner") == 2)
        assert psutil.Process(supervisor.pids()["learner"]).environ()["RANK"] == "7"
        await ended(supervisor, running)


async def test_restarts_are_bounded(tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder) -> None:
    supervisor = make_supervisor(max_restarts=2)
    specs = [fake_spec(tmp_path, "generator-0", "--exit", "1", "--log", "boom"), fake_spec(tmp_path, "reward")]
    with pytest.raises(ServiceExitError, match="generator-0: died more than 2 times"):
        await asyncio.wait_for(supervisor.run([lambda: specs], same_rank), DEADLINE_S)
    assert read_restarts(tmp_path) == {"generator-0": {"exit": 2}}
    assert recorder.tails["generator-0"][-1] == "boom"


async def test_what_ends_itself_because_it_hangs_is_noted_as_such(
    tmp_path: Path, make_supervisor: MakeSupervisor
) -> None:
    supervisor = make_supervisor(max_restarts=1)
    spec = fake_spec(tmp_path, "learner", "--exit", str(StuckError.exit_code), completes_run=True)
    with pytest.raises(ServiceExitError, match="learner: hung more than 1 times within a day") as caught:
        await asyncio.wait_for(supervisor.run([lambda: [spec]], same_rank), DEADLINE_S)
    assert caught.value.status == StuckError.exit_code
    assert read_restarts(tmp_path) == {"learner": {"hung": 1}}


@pytest.mark.parametrize("status", [2, 3, 40, RunBusyError.exit_code])
async def test_failures_that_a_restart_cannot_mend_end_the_run(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder, status: int
) -> None:
    """The reason is said once, in the error, and an error that an earlier process left in the log is none."""
    supervisor = make_supervisor()
    old = log_file(tmp_path, "learner")
    old.parent.mkdir()
    old.write_text('{"level": "error", "message": "of an earlier launch"}\n')
    line = '{"level": "error", "message": "data.train: row 3 has no prompt"}'
    spec = fake_spec(tmp_path, "learner", "--exit", str(status), "--log", line, completes_run=True)
    with pytest.raises(ServiceExitError, match=r"learner: data\.train: row 3 has no prompt") as caught:
        await asyncio.wait_for(supervisor.run([lambda: [spec]], same_rank), DEADLINE_S)
    assert caught.value.status == status
    assert read_restarts(tmp_path) == {}
    assert recorder.tails == {}
    assert recorder.events == []


@pytest.mark.parametrize(
    ("line", "message", "shown"),
    [
        ("", "exited with status 3", []),
        ("SomeError: no such thing", "exited with status 3: SomeError: no such thing", ["SomeError: no such thing"]),
    ],
)
async def test_an_end_without_a_word_shows_the_lines_of_the_process_that_ended(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder, line: str, message: str, shown: list[str]
) -> None:
    old = log_file(tmp_path, "learner")
    old.parent.mkdir()
    old.write_text('{"level": "error", "message": "of an earlier launch"}\n')
    spec = fake_spec(tmp_path, "learner", "--exit", "3", *(["--log", line] if line else []), completes_run=True)
    with pytest.raises(ServiceExitError) as caught:
        await asyncio.wait_for(make_supervisor().run([lambda: [spec]], same_rank), DEADLINE_S)
    assert caught.value.message == f"learner: {message}"
    assert recorder.tails.get("learner", []) == shown


@pytest.mark.parametrize("when", ["--die-unasked", "--die-asked"])
async def test_service_that_ends_before_its_first_answer_is_known_by_its_status(
    tmp_path: Path, make_supervisor: MakeSupervisor, when: str
) -> None:
    """At once, however long it may take to start: no one answers any more."""
    spec = replace(fake_spec(tmp_path, "learner", when, "3", completes_run=True), start_deadline_s=10 * DEADLINE_S)
    with pytest.raises(ServiceExitError) as caught:
        await asyncio.wait_for(make_supervisor().run([lambda: [spec]], same_rank), DEADLINE_S)
    assert caught.value.status == 3
    assert read_restarts(tmp_path) == {}


async def test_run_that_is_complete_before_its_service_is_ready_has_ended(
    tmp_path: Path, make_supervisor: MakeSupervisor
) -> None:
    spec = fake_spec(tmp_path, "learner", "--exit", "0", completes_run=True)
    await asyncio.wait_for(make_supervisor().run([lambda: [spec]], same_rank), DEADLINE_S)
    assert read_restarts(tmp_path) == {}


async def test_drains_in_order_and_kills_what_does_not_end(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    drained = tmp_path / "drained"
    names = ["buffer", "learner", "generator-0"]
    specs = [fake_spec(tmp_path, name, "--drained", str(drained)) for name in names]
    specs.append(fake_spec(tmp_path, "reward", "--drained", str(drained), "--ignore-term", drain_s=0.3))
    order = {"generator-0": 0, "learner": 1, "reward": 2, "buffer": 3}
    supervisor = make_supervisor()
    running = asyncio.create_task(supervisor.run([lambda: specs], lambda name: order[name]))
    await until(lambda: len(supervisor.pids()) == 4 and all(recorder.starts_of(name) for name in order), running)
    await ended(supervisor, running)
    assert drained.read_text().split() == ["generator-0", "learner", "reward", "buffer"]
    assert [event for event in recorder.events if "killed" in event] == [
        f"reward: did not end within 0 s of being asked to, killed (see {tmp_path / 'logs' / 'reward.log'})"
    ]


@pytest.mark.parametrize("reason", ["", "copies i0001-v00000002 to s3://bucket/run"])
async def test_a_learner_is_waited_for_as_long_as_it_writes_its_checkpoint(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder, reason: str
) -> None:
    written = tmp_path / "written"
    spec = fake_spec(tmp_path, "learner", "--writes", str(written), "--reason", reason)
    spec = replace(spec, drain_s=1.0, final_work=FinalWork(learner_work, DEADLINE_S))
    supervisor = make_supervisor()
    running = await started(supervisor, recorder, spec)
    supervisor.interrupt()
    said = f"waits for the learner: {reason or 'checkpointing'} (Ctrl-C again kills at once)"
    await until(lambda: said in recorder.events, running)
    written.touch()
    await asyncio.wait_for(running, DEADLINE_S)
    assert [event for event in recorder.events if "killed" in event] == []


async def test_who_ends_in_error_or_freezes_while_draining_is_named(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    failing = fake_spec(tmp_path, "learner", "--log", "error: the mesh is away", "--asked", "5")
    frozen = fake_spec(tmp_path, "buffer", drain_s=60.0)
    supervisor = make_supervisor(frozen_after_s=1.0)
    running = asyncio.create_task(
        supervisor.run([lambda: [frozen, failing]], lambda name: ["learner", "buffer"].index(name))
    )
    await until(lambda: recorder.starts_of("learner") == recorder.starts_of("buffer") == 1, running)
    os.kill(supervisor.pids()["buffer"], signal.SIGSTOP)
    await ended(supervisor, running)
    named = [event for event in recorder.events if event.startswith(("learner: ", "buffer: "))]
    assert named[0].startswith("learner: the mesh is away")
    assert named[1].startswith("buffer: frozen (stopped by a signal for 1 s), killed")


async def test_who_is_asked_to_end_before_it_was_ready_has_ended_in_order(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    never = tmp_path / "never"
    os.mkfifo(never)
    spec = replace(fake_spec(tmp_path, "generator-0"), command=lambda _restart: ["cat", str(never)])
    supervisor = make_supervisor()
    running = asyncio.create_task(supervisor.run([lambda: [spec]], same_rank))
    await until(lambda: bool(supervisor.pids()), running)
    await ended(supervisor, running)
    assert [event for event in recorder.events if event.startswith("generator-0")] == []


async def test_second_interrupt_kills(tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder) -> None:
    supervisor = make_supervisor()
    spec = fake_spec(tmp_path, "learner", "--ignore-term", drain_s=600.0)
    running = await started(supervisor, recorder, spec)
    supervisor.interrupt()
    await ended(supervisor, running)


async def test_an_interrupt_ends_a_start_that_waits_for_the_fork_server_of(
    tmp_path: Path, make_supervisor: MakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is not executed instead."""
    executed: list[object] = []
    monkeypatch.setattr(service_process, "start_process", lambda *given, **_: executed.append(given))
    monkeypatch.setattr(client, "_LOOK_EVERY_S", DEADLINE_S)
    with ForkServer.spawn((), environment()) or nullcontext() as fork_server:
        assert fork_server is not None
        os.kill(fork_server.pid, signal.SIGSTOP)
        supervisor = make_supervisor(fork_server=fork_server)
        running = asyncio.create_task(supervisor.run([lambda: [fake_spec(tmp_path, "buffer")]], same_rank))
        await until(log_file(tmp_path, "buffer").exists, running)
        await ended(supervisor, running)
    assert executed == []


async def test_children_of_a_service_end_with_it(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    child = tmp_path / "child.pid"
    supervisor = make_supervisor()
    spec = fake_spec(tmp_path, "buffer", "--child", str(child))
    running = await started(supervisor, recorder, spec)
    pid = int(child.read_text())
    assert not gone(pid)
    await ended(supervisor, running)
    await until(lambda: gone(pid))


async def test_children_of_a_killed_service_are_gone_before_it_is_back(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    """A process that an inference engine has started holds memory that the next one needs."""
    child = tmp_path / "child.pid"
    supervisor = make_supervisor()
    running = await started(supervisor, recorder, fake_spec(tmp_path, "generator-0", "--child", str(child)))
    first = int(child.read_text())
    os.kill(supervisor.pids()["generator-0"], signal.SIGKILL)
    await until(lambda: recorder.starts_of("generator-0") == 2, running)
    assert gone(first)
    await ended(supervisor, running)


async def test_children_of_a_service_that_will_not_end_go_with_it(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    child = tmp_path / "child.pid"
    supervisor = make_supervisor()
    spec = fake_spec(tmp_path, "generator-0", "--child", str(child), "--ignore-term", drain_s=0.2)
    running = await started(supervisor, recorder, spec)
    pid = int(child.read_text())
    await ended(supervisor, running)
    await until(lambda: gone(pid))


async def test_service_that_never_gets_ready_is_named(
    tmp_path: Path, make_supervisor: MakeSupervisor, recorder: Recorder
) -> None:
    def command(_restart: bool) -> list[str]:
        return [sys.executable, "-c", "import signal; signal.pause()"]

    spec = fake_spec(tmp_path, "reward")
    spec = type(spec)(spec.name, command, {}, start_deadline_s=0.3, drain_s=1.0)
    supervisor = make_supervisor(max_restarts=0)
    with pytest.raises(UnreachableError, match=r"reward was not ready within 0"):
        await asyncio.wait_for(supervisor.run([lambda: [spec]], same_rank), DEADLINE_S)
    assert supervisor.pids() == {}


LAUNCHER = """
    import asyncio, sys
    from pathlib import Path
    from rollmesh.mesh.config.network import SecuritySection
    from rollmesh.launcher.supervisor import Observer, Supervisor
    from tests.rollmesh.fake_spec import fake_spec

    folder = Path(sys.argv[1])
    specs = [fake_spec(folder, name, "--ignore-term") for name in ("buffer", "generator-0")]
    supervisor = Supervisor(folder, security=SecuritySection(), max_restarts=3, frozen_after_s=0,
                            observer=Observer(event=print))
    async def main():
        running = asyncio.create_task(supervisor.run([lambda: specs], lambda name: 0))
        while not all(supervisor.address(name) for name in ("buffer", "generator-0")):
            await asyncio.sleep(0.02)
        print("PIDS", *supervisor.pids().values(), flush=True)
        await running
    asyncio.run(main())
"""


async def test_killed_launcher_leaves_no_orphan(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(LAUNCHER), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert launcher.stdout is not None
    pids: list[int] = []
    for line in launcher.stdout:
        if line.startswith("PIDS"):
            pids = [int(pid) for pid in line.split()[1:]]
            break
    assert len(pids) == 2
    assert not any(gone(pid) for pid in pids)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    await until(lambda: all(gone(pid) for pid in pids))
