"""The end of a process is certain, whatever its threads wait for."""

from __future__ import annotations

import subprocess
import sys

HANGS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from rollmesh.mesh.runtime.bounded_exit import bound_exit

ThreadPoolExecutor(1, "checkpoint").submit(threading.Event().wait)
print("the last word")
bound_exit(3, 0.2)
sys.exit(3)
"""


def test_a_thread_that_waits_for_ever_does_not_hold_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout) == (3, "the last word\n")
    assert "no longer waits for " in ended.stderr
    assert "checkpoint_0" in ended.stderr
