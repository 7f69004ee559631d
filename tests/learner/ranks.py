"""Two ranks of a test program, as torchrun would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def run_two_ranks(module: str, *arguments: Path) -> None:
    """Runs `python -m module arguments` on two ranks that meet over loopback; both must end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=_ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=110)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-2000:] for error in errors)
