"""Memory of all services over time as columns, and the phases of turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.dashboard.curves.columns import RecordColumns
from rollmesh.report.memory import MemorySample, memory_series
from rollmesh.report.turns import PhaseChange, spans

OF_SERVICE, ON_DEVICES = "memory/", "device_memory"
# More phases than these would be stripes thinner than a line.
_MOST_SPANS = 400


def memory_columns(samples: Sequence[MemorySample]) -> RecordColumns:
    """GiB by service, of its processes alone (`memory/SERVICE`), and of all devices; one row per sample."""
    found = {f"{OF_SERVICE}{service}": values for service, values in memory_series(samples, "anon").items()}
    devices = memory_series(samples, "device")
    if devices:
        found[ON_DEVICES] = [sum(values) for values in zip(*devices.values(), strict=True)]
    columns = RecordColumns()
    for row, sample in enumerate(samples):
        columns.append({"time": sample.unix_s, **{name: values[row] for name, values in found.items()}})
    return columns


def turn_spans(phases: Sequence[PhaseChange], start: float, end: float) -> list[dict[str, Any]]:
    """Beginning, end and side of each phase of turns, in seconds; none where there are too many to be seen.

    Args:
        phases: in the order of time.
        start: Unix time from which seconds count.
        end: of the last phase, in Unix seconds.
    """
    found = [span for span in spans(phases, end) if span[2] != "generating"]
    if len(found) > _MOST_SPANS:
        return []
    return [
        {"from": round(began - start, 2), "to": round(ended - start, 2), "side": side} for began, ended, side in found
    ]
