"""Measurements of a cell, its row of the table, and a file to which cells are added one by one.

Invariant: a file holds one result per cell, the newest. It is complete JSON at any moment, so that a table which was
interrupted continues where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import machine, write_json
from benchmarks.fleet.scenario import Scenario

HEADER = (
    "generators", "fronts", "trajectories/s: paced, full speed", "admission ms, p50 / p99",
    "sealed to leased ms, p50 / p99", "CPU ms per 1,000 of Redis: paced, full speed", "of all fronts", "front MiB",
    "connections of a front", "a tenth killed: groups, seconds", "a tenth frozen: groups, seconds", "ledger", "load",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """Measurements over some seconds.

    Attributes:
        seconds: measured time.
        trajectories_s, groups_s: that came to the learner, per second.
        admission_ms: from a credit to its grant: p50, p99.
        queued_ms: from a group's last member in the buffer to its lease: p50, p99.
        arrival_ms: from the end of a group's last response to the learner's hand: p50, p99.
        cpu_ms: CPU milliseconds per 1,000 trajectories, by process kind; fronts together.
        cores: CPU seconds per second, by process kind.
        load: of the machine, over one minute, at the end.
    """

    seconds: float
    trajectories_s: float
    groups_s: float
    admission_ms: tuple[float, float]
    queued_ms: tuple[float, float]
    arrival_ms: tuple[float, float]
    cpu_ms: dict[str, float]
    cores: dict[str, float]
    load: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """The groups of lost generators.

    Attributes:
        groups: how many they had.
        seconds: from the loss until all were in other hands.
    """

    groups: int
    seconds: float


@dataclass(slots=True)
class Result:
    """Everything about one cell.

    Attributes:
        scenario: what ran.
        joined_s: seconds until all generators had joined.
        idle_cores: CPU seconds per second while all ask for work and there is none, by process kind.
        settled_s: from their first admissions until trajectories came at the rate.
        paced, saturated: the phases.
        killed, frozen: the groups of generators that were killed, and of those that hung; none of the latter in a cell
            without any.
        late_join_s: seconds in which the late joiners had joined.
        rss_mb, files: by process kind, the largest process of it, at the end of the paced phase.
        generator_mb: resident memory of the simulator, per generator.
        total_mb: resident memory of all processes, at the end of the phase at full speed.
        took_s: seconds for the whole cell.
        wrong: what the ledgers do not account for; empty where they are exact.
    """

    scenario: Scenario
    joined_s: float = 0.0
    idle_cores: dict[str, float] = field(default_factory=dict)
    settled_s: float = 0.0
    paced: Phase | None = None
    saturated: Phase | None = None
    killed: Recovery | None = None
    frozen: Recovery | None = None
    late_join_s: float = 0.0
    rss_mb: dict[str, float] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    generator_mb: float = 0.0
    total_mb: float = 0.0
    took_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


def row(result: Result) -> list[str]:
    """One row of the table."""
    paced, fast, killed, scenario = result.paced, result.saturated, result.killed, result.scenario
    assert paced is not None
    assert fast is not None
    return [
        f"{scenario.generators:,}",
        f"{scenario.fronts}{', cluster of 3' if scenario.cluster else ''}",
        f"{paced.trajectories_s:.0f}, {fast.trajectories_s:.0f}",
        _pair(paced.admission_ms),
        _pair(paced.queued_ms),
        *(f"{_milliseconds(paced, role)}, {_milliseconds(fast, role)}" for role in ("redis", "front")),
        f"{result.rss_mb['front']:.0f}",
        f"{result.files['front']}",
        *(f"{lost.groups}, {lost.seconds:.1f}" if lost else "" for lost in (killed, result.frozen)),
        "exact" if not result.wrong else "; ".join(result.wrong),
        f"{max(paced.load, fast.load):.1f}",
    ]


def _milliseconds(phase: Phase, role: str) -> str:
    return f"{phase.cpu_ms[role]:.0f}" if phase.trajectories_s else "none"


def _pair(values: tuple[float, float]) -> str:
    return " / ".join(f"{value:.0f}" for value in values)


class ResultFile:
    """The cells that have been measured so far.

    Args:
        path: of the file; none: cells are kept in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._cells: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._cells = json.loads(path.read_text(encoding="utf-8"))["cells"]

    def has(self, scenario: Scenario) -> bool:
        """True if the file has an exact result of this very scenario."""
        found = self._cells.get(scenario.name)
        return found is not None and not found["wrong"] and found["scenario"] == _plain(asdict(scenario))

    def add(self, result: Result, mood: dict[str, float]) -> None:
        """Adds a cell in the place of an earlier one of its name, with its machine and that machine's mood."""
        cell = {**asdict(result), "row": row(result), "machine": machine(), "yardstick": mood}
        self._cells[result.scenario.name] = _plain(cell)
        if self._path is not None:
            unfinished = self._path.with_suffix(".part")
            write_json(unfinished, {"cells": self._cells})
            unfinished.replace(self._path)

    def rows(self, names: Iterable[str]) -> list[list[str]]:
        """Rows of these cells, as far as they were measured."""
        return [self._cells[name]["row"] for name in names if name in self._cells]


def _plain(value: Any) -> Any:
    """A value as it comes back from a file."""
    return json.loads(json.dumps(value))
