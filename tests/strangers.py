"""Access of another user of the machine to what runs: none. Needs root, which can become another user."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

# Changes to the folder first: those above it are the test's own, and closed.
_STRANGER = """
import json, os, socket, stat, sys
folder, paths = json.load(sys.stdin)
os.chdir(folder)
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
def reach(path):
    if stat.S_ISSOCK(os.stat(path).st_mode):
        return connect(path)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
reached = []
for path in paths:
    try:
        # Of no folder: its name is all that one has to know.
        connect("\\0" + path[1:]) if path.startswith("@") else reach(path)
    except OSError:
        continue
    reached.append(path)
print(json.dumps(reached))
"""


def reached_by_a_stranger(folder: Path, paths: Iterable[str]) -> list[str]:
    """The paths, from `folder` on, that another user can read, list, write or, sockets, connect to."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _STRANGER],
        input=json.dumps((str(folder), list(paths))),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return list(json.loads(done.stdout))


def open_to_strangers(run: Path, root: int) -> list[str]:
    """Access of another user to a live run: to its folder, and to what its processes hold anywhere.

    Args:
        run: its folder, which lies in a folder of the test's.
        root: process id of what has started it.
    """
    files = [run, *(path for path in run.rglob("*") if not path.is_symlink())]
    parent = run.parent
    parent.chmod(0o755)
    inside = [str(path.relative_to(parent)) for path in files if path.exists()]
    family = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    # A test that is itself the one that has started it holds files of its own.
    held = {path for process in family if process.pid != os.getpid() for path in _held(process)}
    inherited = {path for process in psutil.Process(root).parents() for path in _held(process)}
    with _open_to_all(parent) as controls:
        reached = reached_by_a_stranger(parent, [*controls, *inside, *sorted(held)])
    assert reached[: len(controls)] == controls, "what is open is reached"
    # Such a file is as open to strangers as any, but not by the run's fault.
    found = reached[len(controls) :]
    return [f"{path} (inherited from what has started this)" if path in inherited else path for path in found]


def audit_privacy(run: Path, launcher: int) -> None:
    """Checks a run that `rollmesh run` has started: it is its user's alone, each file too, and its Redis has no port.

    Args:
        run, launcher: see `open_to_strangers`.
    """
    modes = {str(path): stat.S_IMODE(path.lstat().st_mode) for path in run.rglob("*") if not path.is_symlink()}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
    assert open_to_strangers(run, launcher) == []
    (redis,) = (one for one in psutil.Process(launcher).children(recursive=True) if one.name() == "redis-server")
    assert redis.net_connections("inet") == []
    assert (run / "redis" / "redis.sock").is_socket()


@contextlib.contextmanager
def _open_to_all(folder: Path) -> Iterator[list[str]]:
    """A file and a socket that every user reaches, by their names in the folder."""
    path, bound = folder / "open to all", folder / "open.sock"
    path.touch()
    path.chmod(0o644)
    with socket.socket(socket.AF_UNIX) as server:
        # By the descriptor of its folder: the path of a test's folder may be too long for a socket.
        handle = os.open(folder, os.O_PATH)
        server.bind(f"/proc/self/fd/{handle}/{bound.name}")
        os.close(handle)
        bound.chmod(0o777)
        server.listen()
        yield [path.name, bound.name]
    bound.unlink()
    path.unlink()


def _held(process: psutil.Process) -> Iterator[str]:
    """Environment, shared memory, sockets, and files that it writes; `@name`: a socket of no folder."""
    with contextlib.suppress(psutil.Error, FileNotFoundError, PermissionError, ProcessLookupError):
        yield f"/proc/{process.pid}/environ"
        for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines():
            if " /dev/shm/" in line and not line.endswith(" (deleted)"):
                yield line.split(maxsplit=5)[5]
        yield from (file.path for file in process.open_files() if file.mode not in ("r", ""))
        yield from (str(bound.laddr) for bound in process.net_connections("unix") if bound.laddr)
