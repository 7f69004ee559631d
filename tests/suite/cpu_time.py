"""CPU seconds per test: of the worker that runs it, and of all the processes below it.

On a busy machine they say more than durations do: they are nearly the same as on a quiet one. Children are sampled
every 0.25 s: walking their threads costs more than most tests.

The start of a server, world or engine that stays for later tests is counted apart: it would count for whichever test
comes first.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

KEY = "cpu_s"
"""Name of the property of a test's last report that holds its CPU seconds."""
_TICK = os.sysconf("SC_CLK_TCK")
# Seconds between two looks at processes that live.
_LOOKS_S = 0.25


class CpuTime:
    """Measures each test in the process that runs it.

    Attributes:
        collection_s: CPU seconds before the first test.
        starts_s: CPU seconds that children which outlived the test that had started them used until its end.
    """

    def __init__(self) -> None:
        self.collection_s = self.starts_s = 0.0
        self._before: float | None = None
        self._used = Used()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Begins after the collection of tests."""
        if self._before is None:
            self._before = self.collection_s = self._used.seconds()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Sends what a test has used with the report of its teardown."""
        if call.when == "teardown":
            before, self._before = self._before or 0.0, self._used.seconds()
            starts = self._used.take_starts()
            self.starts_s += starts
            item.user_properties.append((KEY, max(0.0, self._before - before - starts)))


def cpu_seconds(report: pytest.TestReport) -> float:
    """CPU seconds of a test, with the report of its teardown; else 0."""
    if report.when != "teardown":
        return 0.0
    return sum(value for key, value in report.user_properties if key == KEY and isinstance(value, float))


class Used:
    """CPU seconds of this process and of all that it has started, whether they have ended or not."""

    def __init__(self) -> None:
        self._living: dict[int, float] = {}
        self._starts_s = 0.0
        self._reaped_s = -1.0
        self._looked = 0.0

    def seconds(self) -> float:
        """The seconds so far."""
        user, system, *reaped, _ = os.times()
        # A process that has been reaped is in one of both numbers, never in both.
        if sum(reaped) != self._reaped_s or time.monotonic() - self._looked > _LOOKS_S:
            before, self._living = self._living, {pid: _used_s(pid) for pid in _children(os.getpid())}
            self._starts_s += sum(used for pid, used in self._living.items() if pid not in before)
            self._reaped_s, self._looked = sum(reaped), time.monotonic()
        return user + system + sum(reaped) + sum(self._living.values())

    def take_starts(self) -> float:
        """The seconds of children that this has seen for the first time since the previous call."""
        starts, self._starts_s = self._starts_s, 0.0
        return starts


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
