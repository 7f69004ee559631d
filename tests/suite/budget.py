"""The CPU budget of the suite: seconds per folder, and the folders that a run has overspent.

CPU seconds and not minutes: they are nearly the same on a busy machine. The table is `budget.toml`, next to this file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.suite.results import Results, folder_of

TABLE = Path(__file__).with_name("budget.toml")
# A folder fails above half as much again, and never for less than what a single process start costs.
_FACTOR, _LEAST_S = 1.5, 5.0
_SLOWEST = 5


def read_budget(path: Path = TABLE) -> Mapping[str, float]:
    """CPU seconds by folder."""
    table: Mapping[str, float] = tomllib.loads(path.read_text(encoding="utf-8"))["cpu_seconds"]
    return table


def overspent(results: Results, budget: Mapping[str, float]) -> list[str]:
    """Lines that name each folder that spent half as much again as it may, with its slowest tests."""
    lines = []
    for folder, usage in sorted(results.folders.items()):
        allowed = budget.get(folder)
        if allowed is None:
            lines.append(f"{folder} has no budget: it used {usage.cpu_s:.1f} CPU s")
        elif usage.cpu_s > max(allowed * _FACTOR, allowed + _LEAST_S):
            slowest = sorted(((used, test) for test, used in results.tests.items() if folder_of(test) == folder))
            lines.append(f"{folder} used {usage.cpu_s:.1f} CPU s, its budget is {allowed:g}. Its slowest tests:")
            lines += [f"  {used:6.1f} s  {test}" for used, test in slowest[: -_SLOWEST - 1 : -1]]
    return lines
