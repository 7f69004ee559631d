"""Two ranks of a test program, as `mesh.runtime.ranks` starts them, but that their imports happen once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rollmesh.mesh.runtime.ranks import environment_of
from tests.repository import REPOSITORY

_RANKS = 2


def run_two_ranks(module: str, *arguments: Path) -> None:
    """Runs the module's `main(*arguments)` on two ranks that meet over loopback; both must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tests.learner.ranks", module, *map(str, arguments)]
    process = subprocess.Popen(
        command, env=environment, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        errors = process.communicate(timeout=280)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-4000:]


def _rank(rank: int, meeting: Path, module: str, arguments: list[str]) -> None:
    os.environ.update(environment_of(rank, _RANKS, meeting))
    sys.modules[module].main(*map(Path, arguments))


def main(module: str, *arguments: str) -> None:
    """Forks the ranks."""
    importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        ranks = [context.Process(target=_rank, args=(rank, meeting, module, arguments)) for rank in range(_RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    sys.exit([rank.exitcode for rank in ranks] != [0] * _RANKS)


if __name__ == "__main__":
    main(*sys.argv[1:])
