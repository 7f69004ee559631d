"""Measurements in several ranks: one process for each on this machine, which writes what it has found to a file."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.common import REPOSITORY
from rollmesh.mesh.runtime.ranks import environment_of

_NONE: Mapping[str, str] = MappingProxyType({})


def run_ranks(
    command: Sequence[str], ranks: int, *, timeout_s: float = 900.0, environment: Mapping[str, str] = _NONE
) -> list[Any]:
    """Runs a command once for each rank, on one thread each, and returns the JSON that each has written, by rank.

    Args:
        command: of one rank; the file to write is added as its last argument.
        ranks: number of processes, which find one another by the variables of torchrun.
        timeout_s: after which a rank is killed.
        environment: variables in addition to those of this process.

    Raises:
        SystemExit: a rank has failed.
        subprocess.TimeoutExpired: a rank took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        common = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [*command, str(out)],
                env={**common, **environment_of(rank, ranks, Path(folder) / "meeting")},
                cwd=REPOSITORY,
            )
            for rank, out in enumerate(outs)
        ]
        try:
            ended = [process.wait(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(ended):
            raise SystemExit(f"{' '.join(command)} on {ranks} ranks ended with {ended}")
        return [json.loads(out.read_text(encoding="utf-8")) for out in outs]
