"""CPU seconds per test: of the worker that runs it, and of all the processes below it.

On a busy machine they say more than durations do: they are nearly the same as on a quiet one. A process that is kept
for later tests counts for the test during which it used the time. `--cpu-log FILE` writes a line of JSON per test.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest

_KEY = "cpu_s"
# A folder of a package: `tests/learner/engines`.
_DEPTH = 3
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Usage:
    """Time that the tests of a folder have used.

    Attributes:
        tests: how many have run.
        cpu_s, wall_s: seconds.
        by_test: CPU seconds of each.
    """

    tests: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    by_test: dict[str, float] = field(default_factory=dict)


class CpuTime:
    """Measures where tests run, and adds up where the run is controlled."""

    def __init__(self, log: Path | None) -> None:
        self.folders: defaultdict[str, Usage] = defaultdict(Usage)
        self._before: float | None = None
        self._path = log
        self._log: TextIO | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Begins after the collection of tests."""
        if self._before is None:
            self._before = used_s()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Sends what a test has used with the report of its teardown."""
        if call.when == "teardown":
            before, self._before = self._before or 0.0, used_s()
            item.user_properties.append((_KEY, max(0.0, self._before - before)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a phase of a test to its folder."""
        usage = self.folders[folder_of(report.nodeid)]
        usage.wall_s += report.duration
        if report.when == "teardown":
            used = sum(value for key, value in report.user_properties if key == _KEY and isinstance(value, float))
            usage.tests += 1
            usage.cpu_s += used
            usage.by_test[report.nodeid] = used
            self._write(report.nodeid, used)

    def pytest_unconfigure(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()

    def _write(self, nodeid: str, cpu_s: float) -> None:
        # Opened late: workers have the option too, and report nothing.
        if self._path is not None:
            self._log = self._log or self._path.open("a", encoding="utf-8")
            print(json.dumps({"test": nodeid, "cpu_s": round(cpu_s, 3)}), file=self._log, flush=True)


def folder_of(nodeid: str) -> str:
    """The folder of a test, or of a package above it."""
    return "/".join(nodeid.partition("::")[0].split("/")[:-1][:_DEPTH])


def used_s() -> float:
    """CPU seconds of this process and of all that it has started, whether they have ended or not."""
    return sum(os.times()[:4]) + sum(map(_used_s, _children(os.getpid())))


def _used_s(pid: int) -> float:
    try:
        # Behind the name, which may hold anything: user, system, and both of the children that were waited for.
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return 0.0
    return sum(map(int, ticks)) / _TICK + sum(map(_used_s, _children(pid)))


def _children(pid: int) -> Iterator[int]:
    """Process ids of direct children. Not by a search of all processes: this is asked after each test."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
