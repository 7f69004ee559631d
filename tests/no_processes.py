"""`--no-processes`: a test that starts a process is skipped where it does, so that no list of such tests is kept.

Packages whose tests are about processes, or take long, are left out by name (NOT_FAST in the Makefile). A test that
fails for one that a task or thread of it may not start is skipped too. One that waits for it in vain hangs.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
from collections.abc import Generator
from typing import Any, NoReturn

import pytest

_STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
_REASON = "starts a process"
# Names of the tests that were refused one, as pytest writes them with the phase.
_refused: set[str] = set()


def forbid() -> None:
    """From now on, in this process; what starts while no test runs is no test's."""
    sys.addaudithook(_hear)
    # Its way of starting processes raises no audit event.
    multiprocessing.util.spawnv_passfds = _refuse


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skips what failed for a process that was refused elsewhere than in the test itself."""
    report = yield
    if report.failed and f"{item.nodeid} ({report.when})" in _refused:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), None, f"Skipped: {_REASON}")  # type: ignore[assignment]  # as pytest does
    return report


def _hear(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and "PYTEST_CURRENT_TEST" in os.environ:
        _refuse()


def _refuse(*_arguments: object) -> NoReturn:
    _refused.add(os.environ.get("PYTEST_CURRENT_TEST", ""))
    pytest.skip(_REASON)
