"""The attributes that a child inherits from its parent, besides environment and files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

from rollmesh.mesh.runtime.fork_server.forked import own_status

_FILES = ("oom_score_adj", "coredump_filter", "cgroup")


def surroundings(cwd: Path | str | None) -> dict[str, Any]:
    """The attributes of this process that an order hands over."""
    status = own_status()
    ignored = int(status["SigIgn"], 16)
    return {
        "parent": os.getpid(),
        "folder": str(cwd) if cwd is not None else os.getcwd(),
        "umask": int(status["Umask"], 8),
        "ignored": [number for number in signal.valid_signals() if ignored >> (number - 1) & 1],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "limits": {kind: resource.getrlimit(kind) for kind in _limits()},
    }


def _limits() -> set[int]:
    return {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}


def has_drifted(pid: int) -> bool:
    """Whether this process has other cores, priority or cgroups than one that it has started: it was moved since.

    Anything that the system does not report counts as equal.
    """
    differing = False
    with contextlib.suppress(OSError):
        differing |= os.sched_getaffinity(0) != os.sched_getaffinity(pid)
    with contextlib.suppress(OSError):
        differing |= os.getpriority(os.PRIO_PROCESS, 0) != os.getpriority(os.PRIO_PROCESS, pid)
    for name in _FILES:
        with contextlib.suppress(OSError):
            differing |= Path("/proc/self", name).read_bytes() != Path(f"/proc/{pid}", name).read_bytes()
    return differing
