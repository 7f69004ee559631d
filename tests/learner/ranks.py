"""Two ranks of a test program, as `mesh.runtime.ranks` or torchrun starts them, but that their imports happen once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollmesh.mesh.runtime.ranks import environment_of
from rollmesh.mesh.runtime.threads import thread_environment
from tests import fork_server

_RANKS = 2


def run_two_ranks(module: str, *arguments: Path, torchrun: bool = False) -> None:
    """Runs the module's `main(*arguments)` on two ranks that meet over loopback; both must end well.

    Args:
        module: of the test program.
        arguments: of its `main`.
        torchrun: the ranks are torchrun's.
    """
    starter = "torchrun" if torchrun else "fork"
    with tempfile.TemporaryFile("w+") as errors:
        process = fork_server.popen(
            [starter, module, *map(str, arguments)],
            module=__name__,
            env={**os.environ, **thread_environment(1)},
            stderr=errors,
        )
        try:
            status = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        assert status == 0, errors.read()[-4000:]


def _rank(rank: int, meeting: Path, module: str, arguments: Sequence[str]) -> None:
    os.environ.update(environment_of(rank, _RANKS, meeting))
    sys.modules[module].main(*map(Path, arguments))


def _fork(module: str, *arguments: str) -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        ranks = [context.Process(target=_rank, args=(rank, meeting, module, arguments)) for rank in range(_RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    sys.exit([rank.exitcode for rank in ranks] != [0] * _RANKS)


def _torchrun(*arguments: str) -> None:
    """Hands the command line to torchrun, whose ranks run this file each."""
    from torch.distributed.run import main as run

    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    once = ["--start-method=fork", "--run-path"]
    run([f"--nproc-per-node={_RANKS}", *meeting, *once, str(Path(__file__).resolve()), "rank", *arguments])


def _rank_of_torchrun(module: str, *arguments: str) -> None:
    try:
        sys.modules[module].main(*map(Path, arguments))
    except SystemExit as end:
        # torchrun waits for a rank that ends otherwise than by returning.
        if end.code:
            raise


def main(starter: str, module: str, *arguments: str) -> None:
    """Starts the ranks, or is one of them."""
    importlib.import_module(module)
    {"fork": _fork, "torchrun": _torchrun, "rank": _rank_of_torchrun}[starter](module, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
