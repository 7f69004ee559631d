"""Reads the state of processes from Linux's `/proc`. Other systems have none, so nothing is ever frozen there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from rollmesh.mesh.liveness.freeze_detector import ProcessState, ThreadState

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from the one after the command's name.
_STATE, _UTIME, _STIME = 0, 11, 12
_GONE = frozenset("ZXx")


def read_processes(*pids: int) -> ProcessState | None:
    """The present state of several processes as one: stopped if any of them is.

    None if all have ended, or the system does not report states.
    """
    return _read_tasks(task for pid in pids for task in _tasks(pid))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by Ctrl-Z."""
    seen = read_processes(pid)
    return seen is not None and seen.state is ThreadState.STOPPED


def read_child_process(pid: int) -> ProcessState | None:
    """The state of one process without any other report of its end: GONE once it has ended, also as a zombie."""
    seen = read_processes(pid)
    return ProcessState(ThreadState.GONE, {}) if seen is None and Path("/proc/self").exists() else seen


def read_thread(thread: int) -> ProcessState | None:
    """The state of one thread of this process; None if it has ended, or the system says nothing."""
    return _read_tasks([Path(f"/proc/self/task/{thread}")])


def read_process_trees(roots: Iterable[int]) -> ProcessState | None:
    """The state of processes and all their descendants, as `read_processes` gives it."""
    members = set(roots)
    for root in tuple(members):
        try:
            members.update(child.pid for child in psutil.Process(root).children(recursive=True))
        except psutil.NoSuchProcess:
            members.discard(root)
    return read_processes(*members)


def _tasks(pid: int) -> Iterator[Path]:
    try:
        yield from Path(f"/proc/{pid}/task").iterdir()
    except FileNotFoundError:
        return


def _read_tasks(tasks: Iterable[Path]) -> ProcessState | None:
    states: set[str] = set()
    cpu_s: dict[int, float] = {}
    for task in tasks:
        try:
            text = (task / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name stands in brackets, and may hold brackets and blanks of its own.
        fields = text.rpartition(")")[2].split()
        states.add(fields[_STATE])
        cpu_s[int(task.name)] = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
    if not states - _GONE:
        return None
    return ProcessState(_state(states), cpu_s)


def _state(states: set[str]) -> ThreadState:
    if "t" in states:
        return ThreadState.TRACED
    if "T" in states:
        return ThreadState.STOPPED
    return ThreadState.RUNNABLE if "R" in states else ThreadState.ASLEEP
