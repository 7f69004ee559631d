"""Memory of a run's services over time, as the launcher has measured it: `RUN/memory.jsonl`.

One line is one service at one moment. Old lines are coarsened: then a line is the highest of several moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.report.metrics import read_metrics
from rollmesh.report.turns import PHASES, PhaseChange, phase_at

FILE = "memory.jsonl"
ALL = "all"
"""In place of a service: all of them at one moment. Shared pages are left out, which several may have."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a service: its process and all descendants.

    Attributes:
        anon: resident, in no file; of forked services, with what they share of their imports.
        shared: resident, in files and shared memory; other processes may have the same pages.
        device: of CUDA devices.
    """

    anon: int = 0
    shared: int = 0
    device: int = 0

    def max(self, other: MemoryUse) -> MemoryUse:
        """The larger of each."""
        return MemoryUse(max(self.anon, other.anon), max(self.shared, other.shared), max(self.device, other.device))

    def to_line(self, unix_s: float, service: str) -> dict[str, Any]:
        """A line of the file."""
        return {
            "unix_s": round(unix_s, 3),
            "service": service,
            "anon_bytes": self.anon,
            "shared_bytes": self.shared,
            "device_bytes": self.device,
        }


@dataclass(frozen=True, slots=True)
class MemorySample:
    """All services at one moment.

    Attributes:
        unix_s: Unix time in seconds.
        uses: by service.
    """

    unix_s: float
    uses: Mapping[str, MemoryUse]

    def max(self, later: MemorySample) -> MemorySample:
        """The higher use of each service, at the later moment."""
        names = {**self.uses, **later.uses}
        nothing = MemoryUse()
        uses = {name: self.uses.get(name, nothing).max(later.uses.get(name, nothing)) for name in names}
        return MemorySample(later.unix_s, uses)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Lines of the file."""
        for service, use in self.uses.items():
            yield use.to_line(self.unix_s, service)


def read_memory(folder: Path) -> list[MemorySample]:
    """All samples of a run folder, in the order of time; empty without a file."""
    moments: dict[float, dict[str, MemoryUse]] = {}
    for record in read_metrics(folder / FILE):
        use = MemoryUse(int(record["anon_bytes"]), int(record["shared_bytes"]), int(record["device_bytes"]))
        moments.setdefault(float(record["unix_s"]), {})[str(record["service"])] = use
    return [MemorySample(unix_s, uses) for unix_s, uses in sorted(moments.items())]


class PhasePeaks:
    """The highest memory of each service in each phase of turns."""

    def __init__(self) -> None:
        self._peaks: dict[str, dict[str, MemoryUse]] = {}

    def add(self, phase: str, uses: Mapping[str, MemoryUse]) -> None:
        """Records a sample that was taken in a phase."""
        peaks = self._peaks.setdefault(phase, {})
        together = MemoryUse(sum(use.anon for use in uses.values()), 0, sum(use.device for use in uses.values()))
        for service, use in {**uses, ALL: together}.items():
            peaks[service] = use.max(peaks.get(service, MemoryUse()))

    def to_mib(self) -> dict[str, dict[str, dict[str, float]]]:
        """Phase -> service -> `anon`, `shared` and `device`, in MiB; phases in the order of a turn."""
        order = [*PHASES, *(phase for phase in self._peaks if phase not in PHASES)]
        return {
            phase: {
                service: {name: round(getattr(use, name) / _MIB, 1) for name in ("anon", "shared", "device")}
                for service, use in sorted(self._peaks[phase].items())
            }
            for phase in order
            if phase in self._peaks
        }


def memory_grid(peaks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    """Peaks by phase and service as rows of a table; the first is the head.

    Args:
        peaks: as `PhasePeaks.to_mib` gives them.
    """
    if not peaks:
        return [["no devices were shared"]]
    services = [*sorted({service for uses in peaks.values() for service in uses} - {ALL}), ALL]
    head = ["phase", *services]
    return [head, *([phase, *(_cell(uses.get(name)) for name in services)] for phase, uses in peaks.items())]


def memory_series(samples: Sequence[MemorySample], kind: str) -> dict[str, list[float]]:
    """GiB of one kind (`anon`, `shared`, `device`) by service, one value per sample; all zero is left out."""
    services = sorted({service for sample in samples for service in sample.uses})
    nothing = MemoryUse()
    found = {
        service: [getattr(sample.uses.get(service, nothing), kind) / (_MIB << 10) for sample in samples]
        for service in services
    }
    return {service: values for service, values in found.items() if any(values)}


def peaks_from_samples(samples: Sequence[MemorySample], phases: Sequence[PhaseChange]) -> PhasePeaks:
    """Peaks by phase of samples that are read again; those before the first phase are left out."""
    peaks = PhasePeaks()
    for sample in samples:
        if phase := phase_at(phases, sample.unix_s):
            peaks.add(phase, sample.uses)
    return peaks


def _cell(use: Mapping[str, float] | None) -> str:
    if use is None:
        return "-"
    shared = f" + {use['shared']:.0f} shared" if use["shared"] else ""
    device = f", device {use['device']:.0f}" if use["device"] else ""
    return f"{use['anon']:.0f}{shared}{device}"


def memory_line(peaks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The highest memory of all services together in each phase, in words; empty without phases."""
    parts = [f"{phase} {_gib(uses[ALL])}" for phase, uses in peaks.items() if ALL in uses]
    return f"peak memory of all services by phase, GiB of their own: {', '.join(parts)}" if parts else ""


def _gib(use: Mapping[str, float]) -> str:
    device = f" (devices {use['device'] / 1024:.2f})" if use["device"] else ""
    return f"{use['anon'] / 1024:.2f}{device}"
