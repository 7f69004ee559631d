"""CPU time of tests by folder, at the end of a run in several processes.

On a busy machine it says more than durations do. It is taken where a file's tests end. Processes that are kept for
tests of other files count for what they have used until then.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Generator

import psutil
import pytest
from _pytest.terminal import TerminalReporter

_KEY = "cpu_s"
# A folder of a package: `tests/learner/engines`.
_DEPTH = 3
_SHOWN = 28
_COLUMNS = 4


class CpuTime:
    """Measures where tests run, adds up and reports where the run is controlled."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._ends_file = False
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Begins after the collection of tests."""
        if self._before is None:
            self._before = used_s()
        self._ends_file = nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Sends the time of a file with the report of its last test's end."""
        if call.when == "teardown" and self._ends_file:
            before, self._before = self._before or 0.0, used_s()
            item.user_properties.append((_KEY, self._before - before))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a file's time to its folder's."""
        if report.when == "teardown":
            used = (value for key, value in report.user_properties if key == _KEY)
            self._seconds[folder_of(report.nodeid)] += sum(value for value in used if isinstance(value, float))

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Lists the folders that take most."""
        if not terminalreporter.config.getoption("numprocesses"):
            return
        terminalreporter.section(f"CPU time: {sum(self._seconds.values()):.0f} s")
        most = sorted(self._seconds.items(), key=lambda found: -found[1])[:_SHOWN]
        for first in range(0, len(most), _COLUMNS):
            row = most[first : first + _COLUMNS]
            terminalreporter.write_line("  ".join(f"{seconds:6.0f}s {folder:32}" for folder, seconds in row).rstrip())


def folder_of(nodeid: str) -> str:
    """The folder of a test, or of a package above it."""
    return "/".join(nodeid.partition("::")[0].split("/")[:-1][:_DEPTH])


def used_s() -> float:
    """CPU seconds of this process and of all that it has started, whether they have ended or not."""
    used = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used += sum(child.cpu_times()[:4])
    return used
