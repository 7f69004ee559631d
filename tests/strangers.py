"""What another user of the machine gets of what runs: nothing. Needs root, which can become somebody else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

# Changes to the folder first: those above it are the test's own, and closed.
_STRANGER = """
import json, os, socket, sys
folder, paths = json.load(sys.stdin)
os.chdir(folder)
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
def reach(path):
    if path.endswith(".sock"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    else:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
reached = []
for path in paths:
    try:
        reach(path)
    except OSError:
        continue
    reached.append(path)
print(json.dumps(reached))
"""


def reached_by_a_stranger(folder: Path, paths: list[str]) -> list[str]:
    """The paths, from `folder` on, that another user can read, list, or, sockets, connect to."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _STRANGER],
        input=json.dumps((str(folder), paths)),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return list(json.loads(done.stdout))


def audit_privacy(run: Path, launcher: int) -> None:
    """Of a run that is going: its folder, its shared memory and its Redis are for its user alone.

    Args:
        run: its folder, which lies in a folder of the test's.
        launcher: process id.
    """
    files = [path for path in run.rglob("*") if not path.is_symlink()]
    modes = {str(path): stat.filemode(path.stat().st_mode) for path in (run, *files) if path.exists()}
    assert {path: mode for path, mode in modes.items() if not mode.endswith("------")} == {}
    family = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    (redis,) = (process for process in family if process.name() == "redis-server")
    assert redis.net_connections("inet") == []
    memory = {name for process in family for name in _shared_memory(process) if os.path.exists(name)}
    assert run / "redis" / "redis.sock" in files
    parent, control = run.parent, run.parent / "open to all"
    parent.chmod(0o755)
    control.touch(0o644)
    wanted = [control.name, *(str(path.relative_to(parent)) for path in (run, *files)), *memory]
    assert reached_by_a_stranger(parent, wanted) == [control.name]


def _shared_memory(process: psutil.Process) -> set[str]:
    maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
    return {line.split(maxsplit=5)[5] for line in maps if " /dev/shm/" in line}
