"""A benchmark leaves no run behind, whatever ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.common import REPOSITORY
from benchmarks.mesh_run import wait_for

DEADLINE_S = 240.0
# A run that says its process id, and lasts.
LASTING = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
BENCHMARK = f"""
import sys
from pathlib import Path
from benchmarks.mesh_run import wait_for
wait_for([sys.executable, "-c", {LASTING!r}], Path(sys.argv[1]), 600)
"""


def written(log: Path) -> int:
    """The process id in a log, once it is there."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if log.exists() and log.read_text(encoding="utf-8").endswith("\n"):
            return int(log.read_text(encoding="utf-8"))
        time.sleep(0.02)
    raise TimeoutError(f"nothing in {log}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_ends_with_its_benchmark(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK, str(log)], cwd=REPOSITORY)
    try:
        run = psutil.Process(written(log))
        benchmark.send_signal(number)
        assert benchmark.wait(DEADLINE_S) == (128 + number if number == signal.SIGTERM else -number)
        run.wait(DEADLINE_S)
    finally:
        benchmark.kill()
        benchmark.wait(DEADLINE_S)


def test_a_run_that_is_late_is_ended(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        wait_for([sys.executable, "-c", LASTING], tmp_path / "log", 1.0)
    assert wait_for([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", DEADLINE_S) == 3
