"""CPU time of tests by folder, at the end of a run in several processes.

On a busy machine it says more than durations do. Processes that a test starts count where they have ended: those that
are kept for other tests are left out.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
from _pytest.terminal import TerminalReporter

_KEY = "cpu_s"
# A folder of a package: `tests/learner/engines`.
_DEPTH = 3
_SHOWN = 20


class CpuTime:
    """Measures where tests run, adds up and reports where the run is controlled."""

    def __init__(self) -> None:
        self._before = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Begins with the test's fixtures."""
        self._before = _used_s()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Sends the time with the report of the test's end."""
        if call.when == "teardown":
            item.user_properties.append((_KEY, _used_s() - self._before))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a test's time to its folder's."""
        if report.when == "teardown":
            used = (value for key, value in report.user_properties if key == _KEY)
            self._seconds[folder_of(report.nodeid)] += sum(value for value in used if isinstance(value, float))

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Lists the folders that take most."""
        if not terminalreporter.config.getoption("numprocesses"):
            return
        terminalreporter.section(f"CPU time: {sum(self._seconds.values()):.0f} s")
        for folder, seconds in sorted(self._seconds.items(), key=lambda found: -found[1])[:_SHOWN]:
            terminalreporter.write_line(f"{seconds:8.1f}s {folder}")


def folder_of(nodeid: str) -> str:
    """The folder of a test, or of a package above it."""
    return "/".join(nodeid.partition("::")[0].split("/")[:-1][:_DEPTH])


def _used_s() -> float:
    """CPU seconds of this process, and of those that it has started and that have ended."""
    return sum(os.times()[:4])
