"""The sandbox of this machine as a process of its own."""

from __future__ import annotations

import logging
from pathlib import Path

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.scorers.isolation import IsolationSection
from rollmesh.mesh.runtime.service import Shutdown, run_service, write_ready_file
from rollmesh.reward_service.sandbox.configured import open_executor
from rollmesh.reward_service.sandbox.plugins.server import sandbox_server

log = logging.getLogger(__name__)


def run(
    isolation: IsolationSection,
    *,
    host: str,
    port: int,
    key_file: Path,
    security: SecuritySection,
    ready_file: Path | None,
) -> int:
    """Serves until asked to end; returns the exit code of the process. Arguments as of `sandbox_server`."""

    async def serve(shutdown: Shutdown) -> int:
        executor = await open_executor(isolation)
        try:
            async with sandbox_server(executor, host, port, key_file, security) as url:
                write_ready_file(ready_file, url)
                log.info("programs of other machines run here: %s", url)
                await shutdown.requested.wait()
        finally:
            await executor.close()
        return 0

    return run_service("sandbox", serve)
