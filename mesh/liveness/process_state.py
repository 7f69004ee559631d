"""What Linux says of processes: `Sight` from `/proc`. Other systems say nothing, so nothing is ever frozen there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from rollmesh.mesh.liveness.freeze_detector import Sight, State

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from the one after the command's name.
_STATE, _UTIME, _STIME = 0, 11, 12
_GONE = frozenset("ZXx")


def look(*pids: int) -> Sight | None:
    """Processes now, as one: stopped where any of them is; None where there is none any more, or nothing is said."""
    return _sight(task for pid in pids for task in _tasks(pid))


def look_at_part(pid: int) -> Sight | None:
    """As `look`, at a process whose end no one else reports: seen as gone where it has ended, a zombie too."""
    seen = look(pid)
    return Sight(State.GONE, {}) if seen is None and Path("/proc/self").exists() else seen


def look_at_thread(thread: int) -> Sight | None:
    """One thread of this process now; None where it has ended, or nothing is said of it."""
    return _sight([Path(f"/proc/self/task/{thread}")])


def look_at_families(roots: Iterable[int]) -> Sight | None:
    """Processes, and all that they and theirs have started, as `look` does."""
    members = set(roots)
    for root in tuple(members):
        try:
            members.update(child.pid for child in psutil.Process(root).children(recursive=True))
        except psutil.NoSuchProcess:
            members.discard(root)
    return look(*members)


def _tasks(pid: int) -> Iterator[Path]:
    try:
        yield from Path(f"/proc/{pid}/task").iterdir()
    except FileNotFoundError:
        return


def _sight(tasks: Iterable[Path]) -> Sight | None:
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
    return Sight(_state(states), cpu_s)


def _state(states: set[str]) -> State:
    if "t" in states:
        return State.TRACED
    if "T" in states:
        return State.STOPPED
    return State.RUNNABLE if "R" in states else State.ASLEEP
