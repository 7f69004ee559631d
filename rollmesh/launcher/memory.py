"""Memory of services, process trees included: peaks, and all of it over time.

The high-water mark of each process is the kernel's own, so a peak between two looks is not missed. Phases of turns on
shared devices are told by `RUN/turns.jsonl`. A sample counts for a phase only if that has lasted throughout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollmesh.launcher.memory_log import MemoryLog
from rollmesh.launcher.placement.nvidia_smi import memory_by_process
from rollmesh.learner.placement.turn_log import FILE as TURNS
from rollmesh.mesh.runtime.process_memory import resident_memory
from rollmesh.report.memory import MemorySample, MemoryUse, PhasePeaks
from rollmesh.report.metrics import MetricsTail

_INTERVAL_S = 2.0
# Phases of turns are short.
_INTERVAL_OF_TURNS_S = 0.5


@dataclass(frozen=True, slots=True)
class WatchRules:
    """Settings of the watch.

    Attributes:
        folder: of the run; it exists once the watch runs.
        in_turns: devices are shared in turns.
        on_devices: services have CUDA devices.
    """

    folder: Path
    in_turns: bool = False
    on_devices: bool = False


class MemoryWatch:
    """Measures the memory of services.

    Over restarts of a service the highest counts.

    Args:
        pids: process id of each running service by name.
        rules: see there.

    Attributes:
        rules: may change while it runs, with the placement.
        by_phase: peaks by phase of turns; empty without turns.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]], rules: WatchRules) -> None:
        self._pids = pids
        self.rules = rules
        self._peaks: dict[str, int] = {}
        self._turns: MetricsTail | None = None
        self._phase = ""
        self.by_phase = PhasePeaks()

    @property
    def peaks(self) -> dict[str, int]:
        """Service name -> bytes."""
        return dict(self._peaks)

    async def sample(self, read_devices: Callable[[], Mapping[int, int]] | None = None) -> MemorySample:
        """Takes one measurement of everything that runs.

        Args:
            read_devices: gives bytes of CUDA devices by process id, and takes some tens of milliseconds; None: there
                are no devices.
        """
        phase = self._read_phase()
        on_device = await asyncio.to_thread(read_devices) if read_devices is not None else {}
        uses: dict[str, MemoryUse] = {}
        for name, family in families(self._pids()):
            found = [resident_memory(pid) for pid in family]
            self._peaks[name] = max(self._peaks.get(name, 0), sum(one.peak for one in found))
            uses[name] = MemoryUse(
                sum(one.anonymous for one in found),
                sum(one.files + one.shared for one in found),
                sum(on_device.get(pid, 0) for pid in family),
            )
        if phase and self._read_phase() == phase:
            self.by_phase.add(phase, uses)
        return MemorySample(time.time(), uses)

    async def run(self) -> None:
        """Measures at intervals until cancelled."""
        log = MemoryLog(self.rules.folder)
        while True:
            log.add(await self.sample(memory_by_process if self.rules.on_devices else None))
            await asyncio.sleep(_INTERVAL_OF_TURNS_S if self.rules.in_turns else _INTERVAL_S)

    def _read_phase(self) -> str:
        if not self.rules.in_turns:
            return ""
        if self._turns is None:
            # Not before the first sample: a run that starts over has its former folder renamed.
            self._turns = MetricsTail(self.rules.folder / TURNS, from_end=True)
        if changes := self._turns.read():
            self._phase = str(changes[-1]["phase"])
        return self._phase


def families(pids: Mapping[str, int]) -> Iterator[tuple[str, list[int]]]:
    """Each service that runs, with the process ids of itself and its living descendants."""
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process.pid)
    for name, pid in pids.items():
        family = [pid]
        for member in family:
            family += children.get(member, [])
        yield name, family
