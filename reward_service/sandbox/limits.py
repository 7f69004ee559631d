"""Limits that the kernel keeps for a process and its descendants. Source: setrlimit(2)."""

from __future__ import annotations

import math
import os
import resource
from typing import Any

# Not known to Python on all platforms: bytes of message queues, queued signals.
_SMALL = 64


def apply(limits: dict[str, Any], tasks: int, disk: int) -> None:
    """Limits this process.

    Args:
        limits: the fields of `Limits`.
        tasks: processes and threads that this process' account may have.
        disk: bytes of the largest file.
    """
    cpu_s = math.ceil(limits["cpu_s"])
    for kind, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, limits["memory"] + limits["reserved"]),
        (resource.RLIMIT_DATA, limits["memory"]),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _SMALL),
    ):
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


def tasks_of(uid: int) -> int:
    """Processes and threads that an account has now."""
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    found += len(os.listdir(f"/proc/{name}/task"))
            except OSError:  # it has ended
                continue
    return found
