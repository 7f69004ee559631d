"""The CPU budget of the suite: seconds per folder, and the folders that a run has overspent.

CPU seconds and not minutes: they are nearly the same on a busy machine. A slower machine uses more in every folder; the
median ratio corrects for that. The table is `budget.toml`, next to this file; its row `starts` is for the starts of
what several tests share.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from tests.suite.results import Results, folder_of

TABLE = Path(__file__).with_name("budget.toml")
# A folder fails above half as much again. Modules that several folders need are loaded by the first one that a worker
# comes to, so that each may use as much more.
_FACTOR, _LOADING_S = 1.5, 10.0
STARTS = "starts"
# A folder with fewer CPU seconds says nothing about the machine.
_SETTLED_S = 10.0
_SLOWEST = 5


def read_budget(path: Path = TABLE) -> Mapping[str, float]:
    """CPU seconds by folder."""
    table: Mapping[str, float] = tomllib.loads(path.read_text(encoding="utf-8"))["cpu_seconds"]
    return table


def pace(results: Results, budget: Mapping[str, float]) -> float:
    """CPU seconds of this machine for one of the machine of the table; at least 1."""
    settled = (folder for folder in results.folders if budget.get(folder, 0.0) >= _SETTLED_S)
    ratios = [results.folders[folder].cpu_s / budget[folder] for folder in settled]
    return max(1.0, median(ratios or [1.0]))


def overspent(results: Results, budget: Mapping[str, float]) -> list[str]:
    """Lines that name each folder that spent half as much again as it may, with its slowest tests."""
    lines = []
    factor = pace(results, budget)
    spent = {folder: usage.cpu_s for folder, usage in results.folders.items()} | {STARTS: results.starts_cpu_s}
    for folder, used in sorted(spent.items()):
        allowed = budget.get(folder)
        if allowed is None:
            lines.append(f"{folder} has no budget: it used {used:.1f} CPU s")
        elif used > factor * max(allowed * _FACTOR, allowed + _LOADING_S):
            slowest = sorted(((cost, test) for test, cost in results.tests.items() if folder_of(test) == folder))
            times = f" times {factor:.2f} on this machine" if factor > 1 else ""
            named = " Its slowest tests:" if slowest else ""
            lines.append(f"{folder} used {used:.1f} CPU s, its budget is {allowed:g}{times}.{named}")
            lines += [f"  {cost:6.1f} s  {test}" for cost, test in slowest[: -_SLOWEST - 1 : -1]]
    return lines
