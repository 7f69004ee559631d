"""CPU time of tests by folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def test_a_process_counts_before_and_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    used = Used()
    before = used.seconds()
    with subprocess.Popen([sys.executable, "-S", "-c", busy], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        monkeypatch.setattr(cpu_time, "_LOOKS_S", 0.0)
        assert (living := used.seconds()) - before >= 0.4
        # It looks no more until the child has ended, and counts it once.
        monkeypatch.setattr(cpu_time, "_LOOKS_S", float("inf"))
        child.communicate()
    assert 0.0 <= used.seconds() - living < 0.4
