"""What Linux says of a process: `Sight` from `/proc`. Other systems say nothing, so nothing is ever frozen there."""

from __future__ import annotations

import os
from pathlib import Path

from mesh.liveness.verdict import Sight, State

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from the one after the command's name.
_STATE, _UTIME, _STIME = 0, 11, 12
_GONE = frozenset("ZXx")


def look(pid: int) -> Sight | None:
    """A process now; None where there is none any more, or nothing is said of it."""
    states: set[str] = set()
    cpu_s: dict[int, float] = {}
    try:
        threads = [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return None
    for thread in threads:
        try:
            text = Path(f"/proc/{pid}/task/{thread}/stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name stands in brackets, and may hold brackets and blanks of its own.
        fields = text.rpartition(")")[2].split()
        states.add(fields[_STATE])
        cpu_s[thread] = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
    if not states - _GONE:
        return None
    return Sight(_state(states), cpu_s)


def _state(states: set[str]) -> State:
    if "t" in states:
        return State.TRACED
    if "T" in states:
        return State.STOPPED
    return State.RUNNABLE if "R" in states else State.ASLEEP
