"""States that are read of real processes and threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import psutil
import pytest

from rollmesh.mesh.liveness.freeze_detector import ThreadState
from rollmesh.mesh.liveness.process_state import read_process_trees, read_processes, read_thread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems say nothing")

_DEADLINE_S = 240.0
# One with a child, of which nothing is heard but its number.
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


def test_a_family_is_stopped_where_any_of_it_is() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        child.suspend()
        end = time.monotonic() + _DEADLINE_S
        while child.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < end
        for found, expected in (
            (read_process_trees([parent.pid]), ThreadState.STOPPED),
            (read_processes(child.pid), ThreadState.STOPPED),
        ):
            assert found is not None
            assert found.state is expected
        alone, both = read_processes(parent.pid), read_processes(parent.pid, child.pid)
        assert alone is not None
        assert both is not None
        assert alone.state is not ThreadState.STOPPED
        assert both.state is ThreadState.STOPPED
        assert both.cpu_s.keys() == {parent.pid, child.pid}
    finally:
        parent.communicate()
    assert read_process_trees([parent.pid]) is None
    assert read_processes(parent.pid) is None


def test_a_thread_by_itself() -> None:
    """The one that waits is asleep, however much the others compute."""
    own = read_thread(threading.get_native_id())
    assert own is not None
    assert list(own.cpu_s.values()) == pytest.approx([time.thread_time()], abs=1.0)
    proceed = threading.Event()
    thread = threading.Thread(target=proceed.wait)
    thread.start()
    assert thread.native_id is not None
    end = time.monotonic() + _DEADLINE_S
    while (found := read_thread(thread.native_id)) is None or found.state is not ThreadState.ASLEEP:
        assert time.monotonic() < end
    assert list(found.cpu_s) == [thread.native_id]
    proceed.set()
    thread.join()
    while read_thread(thread.native_id) is not None:
        assert time.monotonic() < end
