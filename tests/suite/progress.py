"""One line that moves while tests run: how many are done, what failed, and the time so far.

On a terminal the line is written over. Elsewhere a new one follows every half minute. Failures are named at once, and
shown in full at the end, as always.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from _pytest.terminal import TerminalReporter

# Seconds between two forms of the line, on a terminal and elsewhere.
_MOVES_S, _REPEATS_S = 0.2, 30.0


class Progress:
    """Takes the place of pytest's letters.

    Args:
        reporter: writes to the terminal.
    """

    def __init__(self, reporter: TerminalReporter) -> None:
        self._reporter = reporter
        self._began = time.monotonic()
        self._total = self._done = self._failed = 0
        self._shown_at = self._began
        self._moves = reporter.isatty

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Learns how many tests there are; every worker has the same."""
        self._total = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learns it from a run in one process."""
        self._total = len(session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Counts outcomes without letters."""
        if not isinstance(report, pytest.TestReport):
            return None
        if report.when == "call" or report.skipped:
            return (report.outcome, "", "")
        return ("error" if report.failed else "", "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Moves the line."""
        if report.failed:
            self._failed += 1
            self._write(f"FAILED {report.nodeid} ({report.when})", stays=True)
        if report.when == "teardown":
            self._done += 1
            self._show(report.nodeid)

    def _show(self, nodeid: str) -> None:
        now = time.monotonic()
        if now - self._shown_at >= (_MOVES_S if self._moves else _REPEATS_S) or self._done == self._total:
            self._shown_at = now
            minutes, seconds = divmod(int(now - self._began), 60)
            failed = f", {self._failed} failed" if self._failed else ""
            where = nodeid.partition("::")[0].removeprefix("tests/")
            self._write(f"{self._done} of {self._total} tests{failed}, {minutes}:{seconds:02}  {where}", stays=False)

    def _write(self, line: str, *, stays: bool) -> None:
        if self._moves:
            self._reporter.rewrite(line, erase=True)
            if stays:
                self._reporter.write_line("")
        else:
            self._reporter.ensure_newline()
            self._reporter.write_line(line, flush=True)
