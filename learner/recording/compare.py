"""Two runs' metrics side by side, step by step: a recorded run and its replay."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import DataError

# Metrics that depend on the clock, on the machine's state, or on the mesh, which a replay does not have.
_PREFIXES = ("timing_s/", "clock/", "push/", "eval/", "perf/", "checkpoint/")
_NAMES = frozenset({"time", "wall_s", "incarnation", "step", "tokens_per_second", "peak_rss_bytes", "step_time"})


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """The values of one metric at one version in two runs.

    Attributes:
        recorded, replayed: the values; None where one side has none.
    """

    name: str
    recorded: float | None
    replayed: float | None


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """The comparison of one version.

    Attributes:
        version: that the step made.
        metrics: number of metrics compared.
        differences: those beyond the tolerance.
        recorded, replayed: the whole records.
    """

    version: int
    metrics: int
    differences: tuple[MetricDifference, ...]
    recorded: Mapping[str, Any]
    replayed: Mapping[str, Any]


def compare(recorded: Path, replayed: Path, *, tolerance: float) -> Iterator[ComparedStep]:
    """Compares all versions that the replay has trained.

    Args:
        recorded, replayed: `metrics.jsonl` of both.
        tolerance: relative difference that counts as equal.

    Raises:
        DataError: a version of the replay is not in the recorded metrics.
    """
    before = _steps(recorded)
    for version, record in sorted(_steps(replayed).items()):
        if version not in before:
            raise DataError(f"{recorded} has no step to version {version}", hint="is it the folder of that run?")
        there, here = _comparable(before[version]), _comparable(record)
        found = [
            MetricDifference(name, there.get(name), here.get(name))
            for name in sorted(there.keys() | here.keys())
            if not _equal(there.get(name), here.get(name), tolerance)
        ]
        yield ComparedStep(version, len(there.keys() | here.keys()), tuple(found), before[version], record)


def _steps(path: Path) -> dict[int, dict[str, Any]]:
    """Records of training steps by version; of several incarnations the last."""
    found = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line) if line.endswith("\n") else {}
            if "version" in record and "timing_s/step" in record:
                found[int(record["version"])] = record
    return found


def _comparable(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in _NAMES and not name.startswith(_PREFIXES)
    }


def _equal(left: float | None, right: float | None, tolerance: float) -> bool:
    if left is None or right is None:
        return False
    both_nan = math.isnan(left) and math.isnan(right)
    return both_nan or math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
