"""Reward workers and processes of models that are forked from one that has loaded their program, not executed.

A file of tests needs dozens of workers. Those of the service are executed: `workers/test_process.py` and
`classifier/test_classifier.py` look at that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache

from rollmesh.mesh.config.variables import without_settings
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.fork_server.forked import ForkedProcess
from rollmesh.mesh.runtime.threads import thread_environment
from rollmesh.reward_service.served_model import connection
from rollmesh.reward_service.workers import process
from tests import fork_server

# All of ours that some worker loads.
_LOADED = (
    "rollmesh.reward_service.workers.program",
    "rollmesh.reward_service.workers.event_loop",
    "rollmesh.reward_service.scorers.auto",
    "rollmesh.reward_service.scorers.mathematics.math_value",
)
_executed, _executed_model = process._start_program, connection._start


def start(fds: tuple[int, ...]) -> ForkedProcess | subprocess.Popen[bytes]:
    """Forks a worker; where the environment is not the one in which the modules were loaded, it is executed."""
    socket, page = fds
    command = _command(_LOADED[0], len(fds))
    return _server().start(command, env=_environment(), stdin=socket, stdout=page, stderr=2) or _executed(fds)


def start_model(fd: int) -> ForkedProcess | subprocess.Popen[bytes]:
    """Forks a model's process, of the module that `connection` names, from the server of commands."""
    (module,) = re.findall(r"from (\S+) import main", connection._PROGRAM)
    environment = {**fork_server.environment(), **_environment()}
    started = fork_server.server().start(_command(module, 1), env=environment, stdin=fd, stdout=2, stderr=2)
    return started or _executed_model(fd)


def _command(module: str, descriptors: int) -> list[str]:
    program = "tests.reward_service.forked_program"
    return [*fork_server.PYTHON, program, module, str(descriptors), json.dumps(sys.path)]


@cache
def _server() -> ForkServer:
    started = ForkServer.spawn(_LOADED, _environment())
    assert started is not None
    return started


def _environment() -> dict[str, str]:
    return fork_server.for_commands({**without_settings(os.environ), **thread_environment(1)})
