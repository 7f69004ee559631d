"""Our own executor on another machine, served by `rollmesh reward sandbox`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from rollmesh.reward_service.sandbox.interface import Job, Ran
from rollmesh.reward_service.sandbox.plugins.http_client import HttpClient
from rollmesh.reward_service.sandbox.plugins.json_jobs import PATH, job_to_json, ran_from_json
from rollmesh.reward_service.sandbox.plugins.turns import PluginExecutor
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

# Seconds for the way there and back, and for the server's own queue.
_ANSWER_S = 60.0


class RemoteSandbox(PluginExecutor):
    """Programs run by the sandbox of another machine.

    Args:
        url: of the server.
        key_file, ca_file: see `HttpClient`.
        size: jobs at once; 0 for as many as this process has CPUs.

    Raises:
        ConfigError: as `HttpClient`.
    """

    def __init__(self, url: str, key_file: Path | None, size: int, *, ca_file: Path | None = None) -> None:
        super().__init__(frozenset({"python", "native"}), size)
        self._client = HttpClient(url, key_file, ca_file)

    def describe(self) -> str:
        """See `Executor.describe`."""
        return f"rung 4: the sandbox at {self._client.url}"

    async def close(self) -> None:
        """Ends all connections."""
        await self._client.close()

    async def _runs(self, job: Job, inputs: Sequence[bytes]) -> AsyncIterator[Ran]:
        left_s = min(job.deadline - time.monotonic(), job.limits.wall_s * len(inputs))
        try:
            async with self._client.lines(PATH, job_to_json(job, inputs), left_s + _ANSWER_S) as lines:
                async for line in lines:
                    yield ran_from_json(json.loads(line))
        except (UnavailableError, ValueError, RecursionError) as error:
            yield Ran("infrastructure", reason=f"the sandbox at {self._client.url}: {error}")
