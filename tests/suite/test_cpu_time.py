"""CPU time of tests by folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.repository import REPOSITORY
from tests.suite import cpu_time
from tests.suite.cpu_time import Used
from tests.suite.results import folder_of


@pytest.mark.parametrize(
    ("nodeid", "folder"),
    [
        ("tests/learner/engines/megatron/test_a.py::test_x[a/b]", "tests/learner/engines"),
        ("tests/buffer/test_a.py::TestY::test_x", "tests/buffer"),
        ("tests/test_a.py::test_x", "tests"),
    ],
)
def test_a_test_counts_for_the_folder_of_its_package(nodeid: str, folder: str) -> None:
    assert folder_of(nodeid) == folder


BUSY = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"


@pytest.mark.parametrize("check", ["a_start_counts_once_and_by_itself", "a_process_counts_before_and_after_its_end"])
def test_among_no_other_processes(check: str) -> None:
    """In a process of its own: this one's children end, and are waited for, at any time."""
    code = f"from tests.suite.test_cpu_time import {check}; {check}()"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=300)


def a_start_counts_once_and_by_itself() -> None:
    """Runs in a process of its own."""
    cpu_time._LOOKS_S = 0.0
    used = Used()
    used.seconds()
    used.take_starts()
    with subprocess.Popen([sys.executable, "-S", "-c", BUSY], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used.seconds()
        assert used.take_starts() >= 0.4
        used.seconds()
        assert used.take_starts() == 0.0
        child.communicate()


def a_process_counts_before_and_after_its_end() -> None:
    """Runs in a process of its own."""
    used = Used()
    before = used.seconds()
    with subprocess.Popen([sys.executable, "-S", "-c", BUSY], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        cpu_time._LOOKS_S = 0.0
        assert (living := used.seconds()) - before >= 0.4
        # It looks no more until the child has ended, and counts it once.
        cpu_time._LOOKS_S = float("inf")
        child.communicate()
    assert 0.0 <= used.seconds() - living < 0.4
