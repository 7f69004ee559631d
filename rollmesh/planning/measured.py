"""The memory that a run took, from its folder: peak resident memory by service, processes of each together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.mesh.errors import DataError
from rollmesh.report.summary import read_summary


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run that has ended.

    Attributes:
        folder: of the run.
        peak_bytes: by service, all of its processes; device memory is not in it.
    """

    folder: str
    peak_bytes: dict[str, int]

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        sizes = ", ".join(f"{name} {size / (1 << 30):.2f}" for name, size in self.peak_bytes.items())
        yield f"measured in {self.folder}, resident host memory at the peak, GiB: {sizes}"


def read_measured(folder: Path) -> MeasuredRun:
    """Reads what a run took.

    Raises:
        DataError: it has not ended, or no such folder.
    """
    summary = read_summary(folder)
    if not summary.peak_memory_mb:
        raise DataError(f"{folder} has no peak memory", hint="it is written when a run ends")
    return MeasuredRun(str(folder), {name: round(size * (1 << 20)) for name, size in summary.peak_memory_mb.items()})
