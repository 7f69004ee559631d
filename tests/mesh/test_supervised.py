"""Commands that cannot outlive the process that started them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import psutil

from mesh.liveness.ends import survivors

DEADLINE_S = 20.0
STARTER = """
    import subprocess, sys, time
    from mesh.supervised import supervised_by_starter
    child = subprocess.Popen(
        supervised_by_starter([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]),
        start_new_session=True,
    )
    print(child.pid, flush=True)
    time.sleep(3600)
"""


def test_a_command_of_another_program_dies_with_it_stopped_or_not() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STARTER)], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert starter.stdout is not None
    lines = {starter.stdout.readline().strip() for _ in range(2)}
    child = psutil.Process(int((lines - {"up"}).pop()))
    child.suspend()
    starter.kill()
    starter.wait()
    starter.stdout.close()
    assert survivors([child.pid], DEADLINE_S) == set()
