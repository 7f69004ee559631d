"""`python -m tests.faults.namespace NAME CLOCK_S ARGUMENT...`: `rollmesh` in a network namespace of `ip netns`."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000


def arguments_in(namespace: str, clock_s: int, command: Sequence[str]) -> dict[str, Any]:
    """Options of `tests.fork_server.popen`.

    Args:
        namespace: in which the command runs; empty: here.
        clock_s: seconds by which its clock is ahead there.
        command: arguments of `rollmesh`.
    """
    if not namespace:
        return {"arguments": command}
    return {"arguments": [namespace, str(clock_s), *command], "module": __name__}


def _enter(name: str) -> None:
    with Path("/run/netns", name).open() as file:
        _call("setns", file.fileno(), _CLONE_NEWNET)
    if (folder := Path("/etc/netns", name)).exists():
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
        for own in folder.iterdir():
            _call("mount", os.fsencode(own), os.fsencode(Path("/etc", own.name)), None, _MS_BIND, None)


def _call(function: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), function)


def _set_clock(ahead_s: int) -> None:
    """Gives the Python code of this process, which has loaded everything, a wall clock of its own."""
    true, true_ns = time.time, time.time_ns

    def ahead() -> float:
        return true() + ahead_s

    time.time, time.time_ns = ahead, lambda: true_ns() + ahead_s * 10**9
    # The clock is a parameter's default where tests give another one.
    gc.unfreeze()
    for function in (found for found in gc.get_objects() if isinstance(found, FunctionType)):
        if any(value is true for value in function.__defaults__ or ()):
            function.__defaults__ = tuple(ahead if value is true else value for value in function.__defaults__ or ())


if __name__ == "__main__":
    from rollmesh.cli.app import main

    _enter(sys.argv.pop(1))
    if clock_s := int(sys.argv.pop(1)):
        _set_clock(clock_s)
    sys.orig_argv = [os.fspath(sys.executable), "-m", "rollmesh.cli", *sys.argv[1:]]
    main()
