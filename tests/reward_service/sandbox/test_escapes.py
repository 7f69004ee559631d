"""Programs that try to get out: each rung stops all of these. Run by root, programs are an ordinary user's."""

from __future__ import annotations

import platform
import socket
from pathlib import Path

import psutil
import pytest

from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.interface import Job, Limits
from rollmesh.reward_service.sandbox.landlock import SCOPES
from tests.reward_service.sandbox.conftest import Run, opened

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A step that fails is not an escape; the rest of the program sees which error it was.
_ATTEMPT = """
import os, sys
def attempt(step):
    try:
        print("ESCAPED", step())
    except OSError as error:
        print(type(error).__name__)
"""
_CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(*{arguments}), os.strerror(ctypes.get_errno()))
"""


async def _stopped(run: Run, program: str) -> list[str]:
    """The errors by which a program's attempts were stopped."""
    ran = await run(_ATTEMPT + program)
    assert (ran.end, ran.code) == ("exit", 0), ran
    assert b"ESCAPED" not in ran.stdout
    return ran.stdout.decode().split()


async def test_files_outside_are_not_read(run: Run, outside: Path) -> None:
    paths = [str(outside / "secret"), "/etc/passwd", "/proc/self/environ", "/proc/1/environ", "/proc/self/mem", "/root"]
    errors = await _stopped(run, f"for path in {paths}: attempt(lambda: open(path).read())")
    assert len(errors) == len(paths)
    assert (
        len(await _stopped(run, f"for path in ['/', '/proc', {str(outside)!r}]: attempt(lambda: os.open(path, 2))"))
        == 3
    )


async def test_nothing_outside_is_written_or_changed(run: Run, outside: Path) -> None:
    secret = outside / "secret"
    before = (secret.stat(), sorted(outside.iterdir()))
    program = f"""
path, folder = {str(secret)!r}, {str(outside)!r}
attempt(lambda: open(path, "w"))
attempt(lambda: os.open(path, os.O_RDONLY | os.O_TRUNC))
attempt(lambda: os.truncate(path, 0))
attempt(lambda: os.chmod(path, 0o777))
attempt(lambda: os.utime(path))
attempt(lambda: os.unlink(path))
attempt(lambda: os.rename(path, "mine"))
attempt(lambda: os.link(path, "mine"))
attempt(lambda: os.mkdir(folder + "/new"))
attempt(lambda: os.mkfifo("fifo"))
attempt(lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR))
attempt(lambda: os.setxattr(path, "user.mark", b"1"))
for path in ("/tmp", "/dev/shm", "/usr", "/dev"):
    attempt(lambda: open(path + "/new", "w"))
"""
    assert len(await _stopped(run, program)) == 16
    assert (secret.stat(), sorted(outside.iterdir())) == before


async def test_links_and_descriptors_lead_nowhere(run: Run, outside: Path) -> None:
    secret = str(outside / "secret")
    program = f"""
def linked():
    os.symlink({secret!r}, "link")
    return open("link").read()
attempt(linked)
attempt(lambda: open("../" * 20 + {secret!r}).read())
attempt(lambda: open(f"/proc/self/fd/{{os.open('.', os.O_RDONLY)}}/../../{secret}").read())
attempt(lambda: os.chroot("."))
for descriptor in range(3, 64):
    try:
        print("ESCAPED", os.fstat(descriptor))
    except OSError:
        pass
"""
    ran = await run(_ATTEMPT + program)
    assert b"ESCAPED" not in ran.stdout
    assert ran.end == "denied"


async def test_no_host_and_no_socket_is_reached(run: Run, outside: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
    ):
        abstract.bind("")
        abstract.listen()
        path = outside / "log"
        log.bind(str(path))
        path.chmod(0o777)
        program = f"""
import socket
def connect(family, address):
    with socket.socket(family) as client:
        client.connect(address)
attempt(lambda: connect(socket.AF_INET, {listener.getsockname()!r}))
attempt(lambda: connect(socket.AF_UNIX, {abstract.getsockname()!r}))
attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt(lambda: socket.getaddrinfo("localhost", 80, flags=0) and connect(socket.AF_INET, ("localhost", 80)))
attempt(lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"x", {str(path)!r}))
attempt(lambda: [each.send(b"x") for each in socket.socketpair()] and open("/nothing"))
"""
        assert len(await _stopped(run, program)) == 6
        path.unlink()


async def test_no_other_process_is_signalled(run: Run) -> None:
    program = """
import fcntl, resource
attempt(lambda: os.kill(os.getppid(), 9))
attempt(lambda: os.kill(-1, 9))
attempt(lambda: os.kill(0, 9))
attempt(lambda: os.killpg(os.getpid() - 1, 9))
attempt(lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()))
attempt(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)))
attempt(lambda: os.sched_setaffinity(os.getppid(), {0}))
attempt(lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19))
"""
    assert len(await _stopped(run, program)) == 8


async def test_a_program_signals_itself(run: Run) -> None:
    ran = await run("import os, signal; signal.signal(10, lambda *_: print('heard')); os.kill(os.getpid(), 10)")
    assert (ran.end, ran.stdout) == ("exit", b"heard\n")


async def test_no_process_is_started(run: Run) -> None:
    program = """
import subprocess
attempt(os.fork)
attempt(lambda: subprocess.run(["/bin/true"]))
attempt(lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt(lambda: os.execv("/bin/true", ["true"]))
attempt(lambda: os.memfd_create("code"))
"""
    assert len(await _stopped(run, program)) == 5


async def test_threads_are_bounded(run: Run) -> None:
    program = """
import threading, time
threading.stack_size(64 << 10)
stop = threading.Event()
started = 0
try:
    while started < 5000:
        threading.Thread(target=stop.wait, daemon=True).start()
        started += 1
except RuntimeError:
    print("bounded")
stop.set()
print(started)
"""
    ran = await run(program)
    bounded, started = ran.stdout.split()
    assert (ran.end, bounded) == ("exit", b"bounded")
    assert int(started) >= 4


@pytest.mark.parametrize(
    ("machine", "number", "arguments"),
    [
        pytest.param("", {"x86_64": 101, "aarch64": 117}, "(0, 0, 0, 0)", id="ptrace"),
        pytest.param("", {"x86_64": 250, "aarch64": 219}, "(0, 0, 0, 0, 0)", id="keyctl"),
        pytest.param("", {"x86_64": 425, "aarch64": 425}, "(8, 0)", id="io_uring"),
        pytest.param("", {"x86_64": 272, "aarch64": 97}, "(0x10000000,)", id="user namespace"),
        pytest.param("", {"x86_64": 56, "aarch64": 220}, "(0x10000011, 0, 0, 0, 0)", id="clone into a user namespace"),
        pytest.param("", {"x86_64": 165, "aarch64": 40}, "(0, 0, 0, 0, 0)", id="mount"),
        pytest.param("", {"x86_64": 321, "aarch64": 280}, "(0, 0, 0)", id="bpf"),
        pytest.param("", {"x86_64": 323, "aarch64": 282}, "(0,)", id="userfaultfd"),
        pytest.param("", {"x86_64": 310, "aarch64": 270}, "(1, 0, 0, 0, 0, 0)", id="memory of another process"),
        pytest.param("x86_64", {"x86_64": 0x40000027}, "()", id="x32"),
    ],
)
async def test_calls_of_attackers_end_a_program(run: Run, machine: str, number: dict[str, int], arguments: str) -> None:
    here = platform.machine()
    if machine not in ("", here):
        pytest.skip(f"a call of {machine}")
    ran = await run(_CALL.format(arguments=f"({number[here]}, *{arguments})"))
    assert (ran.end, ran.stdout) == ("denied", b"")


async def test_clone3_is_unknown_to_programs(run: Run) -> None:
    ran = await run(_CALL.format(arguments="(435, 0, 0)"))
    assert ran.stdout == b"-1 Function not implemented\n"


_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.close(1)
    os.close(2)
    time.sleep(600)
print("left")
"""
_BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        break
time.sleep(600)
"""
_KILLER = """
import os
for pid in (os.getppid(), -1):
    try:
        os.kill(pid, 9)
    except OSError as error:
        print(type(error).__name__)
"""


async def test_children_end_with_the_program() -> None:
    """On rung 3: a daemon that leaves the session, a bomb of processes, and signals to those that watch it."""
    sandbox = await opened(3, size=1)
    try:
        if sandbox._landlock < SCOPES:
            pytest.skip(f"child processes need Landlock {SCOPES}")
        stub = psutil.Process(sandbox._idle[0].pid)
        ends = []
        for source, wall_s in ((_DAEMON, 120.0), (_BOMB, 1.0), (_KILLER, 120.0), ("", 120.0)):
            limits = Limits(cpu_s=60.0, wall_s=wall_s, processes=4, threads=4)
            ran = await sandbox.run(Job("python", {"main.py": source.encode()}, ["main.py"], b"", limits))
            ends.append((ran.end, ran.stdout))
        assert ends[:2] == [("exit", b"left\n"), ("wall", b"")]
        assert ends[2][1].startswith(b"PermissionError\n")
        # The stub has the keeper and the zygote.
        left = [each for each in stub.children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
        assert len(left) <= 2
    finally:
        await sandbox.close()


async def test_programs_that_are_executed_are_confined_too(sandbox: Sandbox, outside: Path) -> None:
    async def ran(*argv: str, **files: bytes) -> tuple[str, int, bytes]:
        ran = await sandbox.run(Job("native", files, argv, b"in", Limits(cpu_s=60.0, wall_s=120.0)))
        assert not ran.reason
        return ran.end, ran.code, ran.stdout

    assert await ran("/bin/cat") == ("exit", 0, b"in")
    assert await ran("/bin/cat", str(outside / "secret")) == ("exit", 1, b"")
    assert await ran("/usr/bin/env") == ("exit", 0, b"")
    assert await ran("./script", script=b"#!/bin/sh\nread x; echo got $x; exit 3\n") == ("exit", 3, b"got in\n")
    assert (await ran("/bin/sh", "-c", "/bin/true & /bin/true & wait; echo done"))[2] == b""
