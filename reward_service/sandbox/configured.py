"""The executor that a configuration asks for."""

from __future__ import annotations

import logging

from rollmesh.mesh.config.scorers.isolation import IsolationSection
from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.interface import Executor
from rollmesh.reward_service.sandbox.languages.toolchains import readable
from rollmesh.reward_service.sandbox.zygote_process import Runtime

log = logging.getLogger(__name__)


async def open_executor(isolation: IsolationSection) -> Executor:
    """Opens the executor of a service, on the highest rung that the host allows or by the plug-in that is named.

    Raises:
        UnavailableError: the host does not allow the rung that is required, or the plug-in does not work; the message
            says what is missing.
    """
    runtime = Runtime(readable=readable(isolation.toolchains))
    executor = await Sandbox.open(require=isolation.require, size=isolation.concurrency or 0, runtime=runtime)
    log.info("isolation of programs: %s", executor.describe())
    return executor
