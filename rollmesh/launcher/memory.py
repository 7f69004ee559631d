"""Peak memory of services, process trees included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

_INTERVAL_S = 2.0


class MemoryWatch:
    """Keeps the highest resident memory seen per service.

    A service's processes are itself and its descendants. On Linux the kernel's own high-water mark is read, so a peak
    between two looks is not missed; over restarts the highest counts.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._peaks: dict[str, int] = {}

    @property
    def peaks(self) -> dict[str, int]:
        """Service name -> bytes."""
        return dict(self._peaks)

    def sample(self) -> None:
        """Takes one measurement of everything that runs."""
        for name, pid in self._pids().items():
            self._peaks[name] = max(self._peaks.get(name, 0), tree_peak_bytes(pid))

    async def run(self) -> None:
        """Measures at intervals until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(_INTERVAL_S)


def tree_peak_bytes(pid: int) -> int:
    """Peak resident bytes of a process and its living descendants; 0 when it is gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(_peak_bytes(member) for member in family)


def _peak_bytes(process: psutil.Process) -> int:
    try:
        for line in Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
