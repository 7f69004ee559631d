"""Ends of processes: of children, of others' children, and of those that their parents never reap."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from rollmesh.mesh.liveness.process_ends import survivors

DEADLINE_S = 240.0
# Starts a child, says its number, and never asks after it.
PARENT = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_who_is_never_reaped_has_ended(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert survivors([parent.pid, child.pid], within_s=0.01) == {parent.pid, child.pid}
    child.kill()
    assert survivors([parent.pid, child.pid], within_s=0.5) == {parent.pid}
    assert survivors([child.pid], DEADLINE_S) == set()
    assert child.status() == psutil.STATUS_ZOMBIE
    assert child.is_running(), "as psutil sees it"


def test_a_child_is_left_to_be_reaped(parent: subprocess.Popen[str]) -> None:
    parent.kill()
    assert survivors([parent.pid], DEADLINE_S) == set()
    assert parent.wait(0) == -9
    assert survivors([parent.pid], DEADLINE_S) == set(), "there is no such process any more"
    assert survivors([], DEADLINE_S) == set()
