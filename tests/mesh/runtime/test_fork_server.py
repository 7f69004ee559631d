"""A forked process is as an executed one. A server that is killed or frozen takes none with it."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.fork_server import client, forked
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.fork_server.decision import can_fork
from rollmesh.mesh.runtime.fork_server.forked import ForkedProcess
from rollmesh.mesh.runtime.fork_server.surroundings import has_drifted
from rollmesh.mesh.runtime.threads import thread_environment
from tests import fork_server
from tests.repository import REPOSITORY

DEADLINE_S = 240.0
PROBE = [*fork_server.PYTHON, "tests.mesh.runtime.forked_probe"]
# Said at the end, and written.
ENDS = ["a thread ends", "at the end", "kept"]
# In which a client has a server, and starts the probe; it says both process ids, and waits.
CLIENT = """
import os, subprocess, sys, time
from rollmesh.mesh.runtime.threads import thread_environment
from rollmesh.mesh.runtime.fork_server import client
from rollmesh.mesh.runtime.fork_server.client import ForkServer
fork_server = ForkServer.spawn(())
environment = {**os.environ, **thread_environment(1)}
forked = fork_server.start(sys.argv[1:], env=environment, stdin=subprocess.DEVNULL, stdout=1, stderr=2)
print(fork_server.pid, flush=True)
time.sleep(3600)
"""
# A forked server and its client, each of which writes when it is there; then a forked command, and what `ps` shows.
LOADING = """
import os, subprocess, sys
from pathlib import Path
from rollmesh.mesh.runtime.fork_server import client
file, folder = Path(sys.argv[1]), Path(sys.argv[2])
lacks = "not {str(), os.getcwd()} & {*sys.path}"
(folder / "shared.py").write_text(
    f"import os, sys\\nwith open({str(file)!r}, 'a') as file:\\n    file.write(f'loads {{{lacks}}} ')"
)
(folder / "service.py").write_text(f"import os, sys\\nprint(open('/proc/self/cmdline').read())\\nprint({lacks})")
sys.path.append(str(folder))
fork_server = client.ForkServer.fork_here(["shared"])
while Path(f"/proc/{fork_server.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "S":
    pass
with file.open("a") as said:
    said.write("told ")
print(Path(f"/proc/{fork_server.pid}/cmdline").read_text(), flush=True)
command = [sys.executable, "-P", "-m", "service", "--option"]
fork_server.start(command, env={**os.environ}, stdin=subprocess.DEVNULL, stdout=1, stderr=2).wait()
"""


def environment(**more: str) -> dict[str, str]:
    return {**fork_server.environment(), **thread_environment(1), **more}


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer.spawn((), environment())
    assert made is not None
    with made:
        yield made


def start(server: ForkServer, *arguments: str, **files: Any) -> ForkedProcess:
    files = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **files}
    forked = server.start([*PROBE, *arguments], env=environment(), stdin=subprocess.DEVNULL, **files)
    assert forked is not None
    return forked


def waiting(server: ForkServer) -> ForkedProcess:
    """A process that is past its start, and waits."""
    read, write = os.pipe()
    forked = start(server, "wait", stdout=write)
    os.close(write)
    with open(read) as said:
        assert int(said.readline()) == forked.pid
    return forked


def told(folder: Path, arguments: list[str], *, forked: bool) -> tuple[int, list[str], str]:
    """Exit status, output, with the contents of the file that it leaves open, and errors of the probe."""
    left_open = folder / "left open"
    command = [*PROBE, *arguments, str(left_open)]
    env = environment(OMP_NUM_THREADS="3", MKL_NUM_THREADS="3")
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        files: Mapping[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = (
            fork_server.server().start(command, env=env, cwd=REPOSITORY, **files)
            if forked
            else subprocess.Popen(die_with_parent(command), env=env, cwd=REPOSITORY, start_new_session=True, **files)
        )
        assert process is not None
        status = process.wait(DEADLINE_S)
        out.seek(0)
        err.seek(0)
        return status, [*out.read().splitlines(), left_open.read_text()], err.read()


@pytest.fixture
def unusual() -> Iterator[None]:
    """Attributes of this process that its children inherit, and that its server has not."""
    fork_server.server()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ignored, mask = signal.signal(signal.SIGHUP, signal.SIG_IGN), os.umask(0o027)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    os.umask(mask)
    signal.signal(signal.SIGHUP, ignored)


@pytest.mark.usefixtures("unusual")
def test_a_forked_process_is_as_an_executed_one(tmp_path: Path) -> None:
    executed, first, second = (told(tmp_path, ["exit", "3"], forked=forked) for forked in (False, True, True))
    assert executed[0] == first[0] == 3
    assert executed[1][1:] == first[1][1:] == ENDS
    assert executed[2] == first[2] == ""
    said = [json.loads(one[1][0]) for one in (executed, first, second)]
    for name, value in said[0]["same"].items():
        assert said[1]["same"][name] == value, name
    assert said[0]["same"]["status"]["Threads"] == "1"
    assert said[0]["same"]["status"]["Umask"] == "0027"
    for name in said[0]["own"]:
        assert len({one["own"][name] for one in said}) == 3, f"{name} is one that several have"


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        (["text"], 1, ["a text"]),
        (["raise"], 1, ["RuntimeError: raised"]),
        (["interrupt"], -2, ["KeyboardInterrupt"]),
        (["status", "-2"], 254, []),
    ],
)
def test_it_ends_as_an_executed_one(how: list[str], status: int, error: list[str], tmp_path: Path) -> None:
    executed, forked = (told(tmp_path, how, forked=forked) for forked in (False, True))
    assert executed[0] == forked[0] == status
    assert executed[1][1:] == forked[1][1:] == ENDS
    assert executed[2].splitlines()[-1:] == forked[2].splitlines()[-1:] == error


def test_a_module_that_the_server_has_loaded_is_run_without_a_warning() -> None:
    """It fails, as it has no launcher."""
    done = fork_server.run(["learner"], module="rollmesh.launcher.preflight.trial")
    assert done.returncode == 1
    assert "Socket operation on non-socket" in done.stderr
    assert "sys.modules" not in done.stderr


def test_a_server_that_has_loaded_everything_has_one_thread() -> None:
    assert fork_server.run(["--version"]).returncode == 0
    assert len(list(Path(f"/proc/{fork_server.server().pid}/task").iterdir())) == 1


@pytest.mark.parametrize(
    ("changed", "forks"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "7", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "NCCL_DEBUG": "INFO", "ROLLMESH_PORT_IS_HELD": "1"}, True),
        ({"LD_PRELOAD": "libfaketime.so"}, False),
        ({"PYTHONPATH": "/elsewhere"}, False),
        ({"MALLOC_ARENA_MAX": "1"}, False),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, False),
        ({"HF_HOME": "/elsewhere"}, False),
        ({"LANG": "C"}, False),
        ({"ANYTHING": "1"}, False),
        ({"OMP_WAIT_POLICY": None}, False),
        ({"OMP_NUM_THREADS": None}, True),
    ],
)
def test_environments_that_differ_in_what_is_read_at_load_are_executed(
    changed: dict[str, str | None], forks: bool
) -> None:
    loaded = {"LANG": "C.UTF-8", "HOME": "/root", "PATH": "/usr/bin", **thread_environment(1)}
    wanted = {name: value for name, value in {**loaded, **changed}.items() if value is not None}
    assert can_fork(fork_server.CLI, wanted, loaded) is forks


@pytest.mark.parametrize(
    "command",
    [
        ["/other/python", *fork_server.CLI[1:]],
        [sys.executable, "-m", "rollmesh.cli"],
        [sys.executable, "-c", ""],
        ["sleep"],
    ],
)
def test_another_interpreter_or_program_is_executed(command: list[str]) -> None:
    assert not can_fork(command, {}, {})


def test_a_launcher_that_was_moved_since_executes(server: ForkServer) -> None:
    """Its services are to run where it was moved, and a server stays where it is."""
    [core, *more] = os.sched_getaffinity(0)
    changes: list[Callable[[int], object]] = [
        lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 3),
        lambda pid: Path(f"/proc/{pid}/oom_score_adj").write_text("900"),
        lambda pid: Path(f"/proc/{pid}/coredump_filter").write_text("0x1"),
        *([lambda pid: os.sched_setaffinity(pid, {core})] if more else []),
    ]
    for change in changes:
        with subprocess.Popen(["sleep", "3600"]) as process:
            try:
                assert not has_drifted(process.pid)
                change(process.pid)
                assert has_drifted(process.pid)
            finally:
                process.kill()
    assert not has_drifted(process.pid), "what is not told is no difference"
    waiting(server).kill()
    changes[0](server.pid)
    assert server.start([*PROBE, "wait"], env=environment(), stdin=0, stdout=1, stderr=2) is None


def test_a_forked_server_loads_when_it_is_told_to_by_its_own_path_and_name(tmp_path: Path) -> None:
    """A command that ends in an error of its configuration has not paid for it. The working folder is not searched."""
    file = tmp_path / "said"
    command = [sys.executable, "-c", LOADING, str(file), str(tmp_path)]
    done = subprocess.run(command, check=True, cwd=tmp_path.parent, env=environment(), capture_output=True, text=True)
    assert file.read_text() == "told loads True "
    said = [line.strip("\0") for line in done.stdout.splitlines()]
    assert said == ["rollmesh: fork server", f"{sys.executable} -P -m service --option", "True"]


@pytest.mark.parametrize("refused", ["os.fork", "socket.socketpair"])
def test_all_is_executed_where_no_server_can_be_forked(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container at its limit of processes or of files."""

    def exhausted(*_: object) -> None:
        raise OSError(errno.EAGAIN, "refused")

    monkeypatch.setattr(client, "has_one_thread", lambda: True)
    monkeypatch.setattr(refused, exhausted)
    files = os.listdir("/proc/self/fd")
    assert ForkServer.fork_here(()) is None
    assert os.listdir("/proc/self/fd") == files


def test_kill9_of_a_forked_process_is_seen_and_of_the_server_touches_none(server: ForkServer) -> None:
    first, second = waiting(server), waiting(server)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait(DEADLINE_S) == -signal.SIGKILL
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    assert server.start([*PROBE, "wait"], env=environment(), stdin=0, stdout=1, stderr=2) is None
    assert second.poll() is None
    second.terminate()
    assert second.wait(DEADLINE_S) == -signal.SIGTERM
    second.kill()


@pytest.mark.parametrize("loads", [True, False])
def test_a_frozen_server_is_given_up(server: ForkServer, monkeypatch: pytest.MonkeyPatch, loads: bool) -> None:
    first = None if loads else waiting(server)
    os.kill(server.pid, signal.SIGSTOP)
    monkeypatch.setattr(client, "_LOOK_EVERY_S", 0.02)
    assert server.start([*PROBE, "wait"], env=environment(), stdin=0, stdout=1, stderr=2) is None
    assert survivors([server.pid]) == set()
    if first is not None:
        assert first.poll() is None
        first.kill()
        assert first.wait(DEADLINE_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("end", "within_s", "reports"),
    [("ready", DEADLINE_S, [True]), ("stopped", DEADLINE_S, [True, False]), ("too slow", 0.0, [False])],
)
def test_a_long_wait_is_reported_once_and_ends(
    server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: str,
    within_s: float,
    reports: list[bool],
) -> None:
    looks = 0
    ours, theirs = socket.socketpair()

    def looked(_pid: int) -> bool:
        nonlocal looks
        looks += 1
        if looks == 3 and end == "ready":
            theirs.sendall(b"r")
        return looks == 3 and end == "stopped"

    monkeypatch.setattr(client, "is_stopped", looked)
    monkeypatch.setattr(client, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(client, "_SLOW_S", 0.0)
    with ours, theirs, nullcontext() if end == "ready" else pytest.raises(TimeoutError):
        server._await_word(ours, within_s)
    assert ["still waiting" in record.getMessage() for record in caplog.records] == reports


def test_kill9_of_the_client_ends_its_server_and_all_that_was_forked() -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *PROBE, "wait"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment(),
    )
    assert client.stdout is not None
    pids = [int(client.stdout.readline()) for _ in range(2)]
    assert survivors(pids) == set(pids)
    client.kill()
    client.wait()
    assert survivors(pids, DEADLINE_S) == set()
    client.stdout.close()


@pytest.fixture
def ignoring_ends() -> Iterator[None]:
    """Makes this process ignore the ends of its children, and its children with it."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("ignoring_ends")
def test_an_end_is_seen_when_its_status_is_not_and_among_a_thousand_files(server: ForkServer) -> None:
    """`Popen` too reports 0 then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert [start(server, "status", "5", os.devnull).wait(DEADLINE_S) for _ in range(2)] == [0, 0]
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("lacking", ["no pidfd", "not allowed", "no status"])
def test_nothing_is_forked_where_the_kernel_lacks_something(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.3, under a filter of system calls, and in gVisor."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS if lacking == "no pidfd" else errno.EPERM, "refused")

    if lacking == "no status":
        monkeypatch.setattr(forked, "own_status", lambda: {"Name": "python", "State": "R"})
    else:
        monkeypatch.setattr(os, "pidfd_open", refused)
    forked.can_fork_here.cache_clear()
    monkeypatch.setattr(client, "has_one_thread", lambda: True)
    try:
        assert ForkServer.spawn(()) is None
        assert ForkServer.fork_here(()) is None
    finally:
        forked.can_fork_here.cache_clear()


def test_closing_the_server_ends_the_wait_for_it(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    monkeypatch.setattr(client, "_LOOK_EVERY_S", DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        order = pool.submit(server.start, [*PROBE, "wait"], env=environment(), stdin=0, stdout=1, stderr=2)
        server.close()
        assert order.result(DEADLINE_S) is None


def test_an_orphan_that_was_adopted_is_reaped_and_a_child_of_the_users_own_is_not() -> None:
    parent = subprocess.Popen(["sh", "-c", "sleep 3600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    earlier = subprocess.Popen(["sh", "-c", "exit 6"])
    with client._adopting():
        parent.kill()
        parent.wait()
        own = subprocess.Popen(["sh", "-c", "exit 7"])
        for child in (earlier, own):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert orphan.ppid() == os.getpid()
    orphan.kill()
    while psutil.pid_exists(orphan.pid):
        time.sleep(0.01)
    assert (earlier.wait(), own.wait()) == (6, 7)
    parent.stdout.close()


def test_this_process_adopts_for_a_moment_only(server: ForkServer) -> None:
    """An orphan of a user's own goes where it would have gone."""
    waiting(server).kill()
    orphan = "import os, time\nif os.fork() == 0:\n  time.sleep(0.2)\n  print(os.getppid())"
    said = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True, check=True)
    assert int(said.stdout) != os.getpid()


def test_one_that_ended_is_waited_for_once_and_by_several(server: ForkServer) -> None:
    forked = start(server, "status", "5", os.devnull)
    assert forked.wait(DEADLINE_S) == forked.wait() == forked.poll() == forked.returncode == 5
    other = waiting(server)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.05)
    other.kill()
    assert other.wait(DEADLINE_S) == -signal.SIGKILL
    with pytest.raises(ChildProcessError):
        os.waitpid(other.pid, 0)
