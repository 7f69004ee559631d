"""`--no-processes`: a test that starts a process is skipped where it does, so that no list of such tests is kept.

Packages whose tests are about processes are left out by name (NOT_FAST in the Makefile). A test that starts one in a
task that it does not await is not skipped, but waits in vain.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
from typing import Any, NoReturn

import pytest

_STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}


def forbid() -> None:
    """From now on, in this process; what starts while no test runs is no test's."""
    sys.addaudithook(_hear)
    # Its way of starting processes raises no audit event.
    multiprocessing.util.spawnv_passfds = _refuse


def _hear(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and "PYTEST_CURRENT_TEST" in os.environ:
        _refuse()


def _refuse(*_arguments: object) -> NoReturn:
    pytest.skip("starts a process")
