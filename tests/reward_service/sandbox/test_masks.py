"""Means of confinement, masked in turn: all that one alone stops then gets through, and nothing else.

So each rung says what it has to stop, and a means that does nothing does not go unnoticed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.sandbox import landlock, zygote_process
from rollmesh.reward_service.sandbox.interface import Job, Limits
from rollmesh.reward_service.scoring.engine import ScoringEngine
from tests.reward_service.sandbox.conftest import opened

LANDLOCK, SECCOMP, LIMITS, NAMESPACES = "landlock", "seccomp", "limits", "namespaces"
# Code that masks a means in the zygote, before it starts.
MASKS = {
    LANDLOCK: "from rollmesh.reward_service.sandbox import landlock; landlock.restrict_self = lambda descriptor: None",
    SECCOMP: "from rollmesh.reward_service.sandbox import linux; linux.Filter.install = lambda self: None",
    LIMITS: "from rollmesh.reward_service.sandbox import limits; limits.apply = lambda *arguments: None",
}


@dataclass(frozen=True)
class Attempt:
    """A way out.

    Attributes:
        code: fails where it is stopped.
        rung2, rung3: the means that stop it there, each alone.
        processes: that the program may have.
    """

    code: str
    rung2: frozenset[str]
    rung3: frozenset[str]
    processes: int = 1


def _by(*means: str) -> frozenset[str]:
    return frozenset(means)


ATTEMPTS = {
    "reads a file": Attempt("open(SECRET).read()", _by(LANDLOCK), _by(NAMESPACES)),
    "learns that a file exists": Attempt("os.stat(SECRET)", _by(), _by(NAMESPACES)),
    "makes a file": Attempt("open(os.path.dirname(SECRET) + '/new', 'w')", _by(LANDLOCK), _by(NAMESPACES)),
    "calls a host": Attempt(
        "socket.create_connection(LISTENER)", _by(SECCOMP, LANDLOCK), _by(SECCOMP, LANDLOCK, NAMESPACES)
    ),
    "calls a service of this host": Attempt(
        "socket.socket(socket.AF_UNIX).connect(ABSTRACT)",
        _by(SECCOMP, LANDLOCK),
        _by(SECCOMP, LANDLOCK, NAMESPACES),
    ),
    "sends a datagram": Attempt(
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', LISTENER)",
        _by(SECCOMP),
        _by(SECCOMP, NAMESPACES),
    ),
    "opens a socket of the kernel": Attempt("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", *[_by(SECCOMP)] * 2),
    "starts a process": Attempt("os.fork() or os._exit(0)", *[_by(SECCOMP)] * 2),
    "runs a program of the host": Attempt("os.execv('/bin/echo', ['echo', 'ESCAPED'])", *[_by(SECCOMP)] * 2),
    "runs a program from memory": Attempt("os.memfd_create('code')", *[_by(SECCOMP)] * 2),
    "makes namespaces": Attempt("called(libc.unshare(0x10000000))", *[_by(SECCOMP)] * 2),
    "uses keys of the kernel": Attempt("called(libc.syscall(KEYCTL, 0, -3, 1))", *[_by(SECCOMP)] * 2),
    "signals what watches it": Attempt("os.kill(os.getppid(), 0)", *[_by(SECCOMP, LANDLOCK)] * 2),
    "with children, signals what watches it": Attempt("os.kill(os.getppid(), 0)", _by(), _by(LANDLOCK), processes=2),
    "takes much memory": Attempt("__import__('mmap').mmap(-1, 1 << 30)", *[_by(LIMITS)] * 2),
    "opens many files": Attempt("[open('main.py') for _ in range(200)]", *[_by(LIMITS)] * 2),
}
_PROGRAM = """
import ctypes, os, platform, socket
libc = ctypes.CDLL(None)
KEYCTL = {{"x86_64": 250}}.get(platform.machine(), 219)
SECRET, LISTENER, ABSTRACT = {secret!r}, {listener!r}, {abstract!r}
def called(result):
    if result < 0:
        raise OSError
try:
    {code}
    print("ESCAPED", flush=True)
except (OSError, MemoryError):
    pass
"""


# Attempts that leave the process that makes them as it is; rungs 0 and 1 stop none.
NOT_STOPPED = (
    *("reads a file", "learns that a file exists", "makes a file", "calls a host", "calls a service of this host"),
    *("sends a datagram", "opens a socket of the kernel", "starts a process", "signals what watches it"),
)
CRASHES, HANGS = "os._exit(3)", "__import__('time').sleep(600)"
_FUNCTIONS = """
import contextlib, io
def rung1(solution_str, ground_truth):
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(solution_str, {"__name__": "program"})
    return float("ESCAPED" in told.getvalue())
async def rung0(solution_str, ground_truth):
    return rung1(solution_str, ground_truth)
"""


@pytest.fixture
def targets(outside: Path) -> Iterator[dict[str, object]]:
    """Targets of the attempts."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("")
        abstract.listen()
        yield {
            "secret": str(outside / "secret"),
            "listener": listener.getsockname(),
            "abstract": abstract.getsockname(),
        }
    (outside / "new").unlink(missing_ok=True)


@pytest.mark.parametrize("rung", [2, 3])
@pytest.mark.parametrize("mask", ["", *MASKS])
async def test_each_means_stops_what_it_alone_stops(
    rung: int, mask: str, targets: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if landlock.version() < landlock.SCOPES:
        pytest.skip(f"Landlock {landlock.SCOPES}: this kernel has {landlock.version()}")
    program = zygote_process._PROGRAM.replace("sys.path.pop();", f"{MASKS.get(mask, 'pass')}; sys.path.pop();")
    monkeypatch.setattr(zygote_process, "_PROGRAM", program)
    attempts = {name: each for name, each in ATTEMPTS.items() if each.processes == 1 or rung == 3}
    sandbox = await opened(rung)
    try:
        escaped = set()
        for name, attempt in attempts.items():
            source = _PROGRAM.format(code=attempt.code, **targets)
            limits = Limits(cpu_s=60.0, wall_s=120.0, memory=256 << 20, processes=attempt.processes)
            ran = await sandbox.run(Job("python", {"main.py": source.encode()}, ["main.py"], limits=limits))
            assert ran.end in ("exit", "denied"), ran
            if b"ESCAPED" in ran.stdout:
                escaped.add(name)
    finally:
        await sandbox.close()
    stopped_by = {name: attempt.rung2 if rung == 2 else attempt.rung3 for name, attempt in attempts.items()}
    assert escaped == {name for name, means in stopped_by.items() if means <= {mask}}


@pytest.mark.parametrize("rung", [0, 1])
async def test_rungs_of_functions_stop_what_would_stop_the_service(
    rung: int, targets: dict[str, object], tmp_path: Path, make_item: Callable[..., reward_pb2.ScoreItem]
) -> None:
    functions = tmp_path / "functions.py"
    functions.write_text(_FUNCTIONS)

    async def told(codes: Sequence[str], timeout_s: float) -> list[str | float]:
        engine = ScoringEngine([f"{functions}:rung{rung}"], workers=2, call_timeout_s=timeout_s)
        try:
            await engine.start()
            items = [make_item(code, _PROGRAM.format(code=code, **targets)) for code in codes]
            return [each.error.code or each.scored.total for each in await engine.score(items, 120.0)]
        finally:
            await engine.close()

    codes = [ATTEMPTS[name].code for name in NOT_STOPPED]
    assert await told([*codes, CRASHES], 120.0) == [1.0] * len(codes) + ["crashed"]
    assert await told([HANGS], 0.5) == ["timeout"]
