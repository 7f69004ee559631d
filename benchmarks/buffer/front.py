"""The buffer service as a child process, under a profiler by choice."""

from __future__ import annotations

import cProfile
import sys
from pathlib import Path
from typing import Any

from rollmesh.buffer.server.process import run
from rollmesh.mesh.config import load_config


def serve(values: dict[str, Any], ready: Path, profile: Path | None) -> None:
    """Runs the service until SIGTERM; writes its profile (for `pstats`) at the end where one is wanted."""
    config = load_config({**values, "logging": {"level": "warning"}})
    if profile is None:
        sys.exit(run(config, host="127.0.0.1", port=0, ready_file=ready))
    profiler = cProfile.Profile()
    code = profiler.runcall(run, config, host="127.0.0.1", port=0, ready_file=ready)
    profiler.dump_stats(profile)
    sys.exit(code)
