"""Reward workers that are forked from a process that has loaded their program, not executed.

A file of tests needs dozens of them. Those of the service are executed: `workers/test_process.py` looks at that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

from rollmesh.mesh.config.variables import without_settings
from rollmesh.mesh.runtime.threads import thread_environment
from rollmesh.mesh.runtime.warm_start.client import WarmServer
from rollmesh.mesh.runtime.warm_start.forked import Forked
from rollmesh.reward_service.workers import process
from tests.repository import REPOSITORY

# All of ours that some worker loads.
_LOADED = (
    "rollmesh.reward_service.workers.program",
    "rollmesh.reward_service.workers.event_loop",
    "rollmesh.reward_service.scorers.auto",
    "rollmesh.reward_service.scorers.math_value",
)
_PROGRAM = "tests.reward_service.forked_worker"
_executed = process._start_program


def start(fds: tuple[int, ...]) -> Forked | subprocess.Popen[bytes]:
    """Forks a worker; where the environment is not the one in which the modules were loaded, it is executed."""
    connection, page = fds
    # The name tells workers from other children.
    command = [sys.executable, "-m", _PROGRAM, process.__name__, json.dumps(sys.path)]
    return _server().start(command, env=_environment(), stdin=connection, stdout=page, stderr=2) or _executed(fds)


@cache
def _server() -> WarmServer:
    started = WarmServer.execute(_LOADED, _environment())
    assert started is not None
    return started


def _environment() -> dict[str, str]:
    whole = {**without_settings(os.environ), **thread_environment(1), "PYTHONPATH": str(REPOSITORY)}
    return {name: value for name, value in whole.items() if name != "PYTEST_CURRENT_TEST"}
