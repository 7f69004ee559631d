"""The sandbox of this machine, for reward services of others: `POST /v1/run`, the ends of runs as lines of JSON.

Invariants: a request needs the key before its body is read. Bodies are bounded, and so are requests in progress. A
caller that goes away ends its job.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from rollmesh.mesh.access.tls import server_context
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, PortInUseError
from rollmesh.mesh.http.connections import Connections
from rollmesh.mesh.http.server import is_bearer, serving
from rollmesh.mesh.private_files import read_secret
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.mesh.text import bounded
from rollmesh.reward_service.sandbox.interface import Executor, Ran
from rollmesh.reward_service.sandbox.plugins.json_jobs import PATH, job_from_json, ran_to_json
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

log = logging.getLogger(__name__)
_JSON, _LINES = "application/json", "application/x-ndjson"
_REQUEST_S, _BODY_S = 30.0, 30.0
_MOST_BODY = 64 << 20
_MOST_CONNECTIONS, _MOST_JOBS = 256, 128


@asynccontextmanager
async def sandbox_server(
    executor: Executor, host: str, port: int, key_file: Path, security: SecuritySection
) -> AsyncIterator[str]:
    """Serves an executor while the context lasts; yields the URL.

    Args:
        executor: runs the jobs.
        host, port: to bind; port 0: a free one.
        key_file: the key that callers send.
        security: its certificate.

    Raises:
        ConfigError: an unreadable key or certificate; no certificate, off loopback.
        PortInUseError: the address cannot be bound.
    """
    key = read_secret(key_file, "--key-file", how=f"rollmesh token new --out {key_file} makes one")
    tls = server_context(security)
    if tls is None and not is_loopback(host):
        raise ConfigError(
            f"refusing to run programs for others at {host} without TLS: their key would travel in clear",
            hint="give --tls-cert and --tls-key, or listen on 127.0.0.1",
        )
    connections = Connections(_MOST_CONNECTIONS)
    answers = _Answers(executor, key, connections)
    try:
        async with serving(answers.answer, connections, host, port, tls, request_s=_REQUEST_S) as url:
            yield url
    except OSError as error:
        raise PortInUseError(f"cannot bind {host}, port {port}: {error.strerror}") from error


class _Answers:
    def __init__(self, executor: Executor, key: str, connections: Connections) -> None:
        self._executor = executor
        self._key = key
        self._connections = connections
        self._jobs = 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request."""
        with self._connections.answering(request):
            if not is_bearer(request.headers.get("Authorization", ""), self._key):
                return web.Response(status=401, text="missing or wrong key\n", headers={"WWW-Authenticate": "Bearer"})
            if (request.path, request.method, request.content_type) != (PATH, "POST", _JSON):
                return web.Response(status=404, text=f"there is POST {PATH}, with {_JSON}\n")
            if self._jobs >= _MOST_JOBS:
                return web.Response(status=503, text="too many jobs are waiting\n", headers={"Retry-After": "1"})
            self._jobs += 1
            try:
                return await self._run(request)
            finally:
                self._jobs -= 1

    async def _run(self, request: web.BaseRequest) -> web.StreamResponse:
        content = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.content.iter_any():
                    content += chunk
                    if len(content) > _MOST_BODY:
                        return web.Response(status=413, text=f"a body has at most {_MOST_BODY} bytes\n")
            job, inputs = job_from_json(json.loads(content))
        except TimeoutError:
            return web.Response(status=408, text=f"the body did not arrive within {_BODY_S:g} s\n")
        except (ValueError, RecursionError) as error:
            return web.Response(status=400, text=f"the body is no job: {bounded(str(error), 300)}\n")
        response = web.StreamResponse(headers={"Content-Type": _LINES})
        ends: asyncio.Queue[Ran | None] = asyncio.Queue()

        def told(ran: Ran) -> bool:
            ends.put_nowait(ran)
            return False

        async def run() -> None:
            try:
                await self._executor.run_all(job, inputs, stop=told)
            except UnavailableError as error:
                ends.put_nowait(Ran("infrastructure", reason=str(error)))
            finally:
                ends.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            await response.prepare(request)
            while (ran := await ends.get()) is not None:
                await response.write(json.dumps(ran_to_json(ran)).encode() + b"\n")
            await running
            await response.write_eof()
        finally:
            running.cancel()
        return response
