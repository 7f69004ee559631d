"""CPU seconds per test: of the worker that runs it, and of all the processes below it.

On a busy machine they say more than durations do: they are nearly the same as on a quiet one. A process that is kept
for later tests counts for the test during which it used the time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

KEY = "cpu_s"
"""Name of the property of a test's last report that holds its CPU seconds."""
_SHORT_S = 0.05
_TICK = os.sysconf("SC_CLK_TCK")


class CpuTime:
    """Measures each test in the process that runs it.

    Attributes:
        collection_s: CPU seconds before the first test.
    """

    def __init__(self) -> None:
        self.collection_s = 0.0
        self._counted: float | None = None
        self._own = 0.0
        self._lasts = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Begins after the collection of tests."""
        if self._counted is None:
            self._counted = self.collection_s = used_s()
            self._own = _own_s()
        self._lasts = 0.0
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Sends what a test has used with the report of its teardown."""
        self._lasts += call.duration
        if call.when == "teardown":
            item.user_properties.append((KEY, self._used_since()))

    def _used_since(self) -> float:
        """CPU seconds since the previous test.

        The search for children costs more than most tests: a short test counts without them, and what they used counts
        for the next long one.
        """
        before, self._own = self._own, _own_s()
        used = self._own - before if self._lasts < _SHORT_S else max(0.0, used_s() - (self._counted or 0.0))
        self._counted = (self._counted or 0.0) + used
        return used


def cpu_seconds(report: pytest.TestReport) -> float:
    """CPU seconds of a test, with the report of its teardown; else 0."""
    if report.when != "teardown":
        return 0.0
    return sum(value for key, value in report.user_properties if key == KEY and isinstance(value, float))


def used_s() -> float:
    """CPU seconds of this process and of all that it has started, whether they have ended or not."""
    return _own_s() + sum(map(_used_s, _children(os.getpid())))


def _own_s() -> float:
    """CPU seconds of this process and of those that it has started and waited for."""
    return sum(os.times()[:4])


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
