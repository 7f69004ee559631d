"""The page from which Prometheus reads a service's metrics.

Invariants: it is on loopback unless `network.metrics_host` says otherwise, and then it has a key; there is one path,
which is only read. No client holds anything for long (`mesh.http.connections`), and a connection is for one request.
The page is written in a thread of its own, concurrently with the service's work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from rollmesh.mesh.access.tls import server_context
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import PortInUseError
from rollmesh.mesh.http.connections import Connections
from rollmesh.mesh.http.process_metrics import process_metrics
from rollmesh.mesh.http.server import http_key, is_bearer, serving

log = logging.getLogger(__name__)
PATH = "/metrics"
# Seconds that a connection has for its request; and how many connections there are at once.
REQUEST_S = 10.0
MOST_CONNECTIONS = 32
_METHODS = ("GET", "HEAD")


@asynccontextmanager
async def metrics_server(
    registry: CollectorRegistry, host: str, security: SecuritySection, *, port: int = 0, enabled: bool
) -> AsyncIterator[str]:
    """Serves a registry while the context lasts, with the metrics of the process; yields the URL, which is logged too.

    Args:
        registry: its collectors are asked in a thread of their own.
        host: address to bind (`network.metrics_host`).
        security: key and TLS.
        port: `network.metrics_port`; 0: a free one.
        enabled: `network.metrics`; else nothing is served, and the URL is empty.

    Raises:
        ConfigError: a non-loopback address without a key; an unreadable key or certificate.
        PortInUseError: the address cannot be bound.
    """
    if not enabled:
        yield ""
        return
    key = http_key(
        security.metrics_key_file, "security.metrics_key_file (--metrics-key-file)", host, "metrics", security
    )
    tls = server_context(security)
    connections = Connections(MOST_CONNECTIONS)
    async with AsyncExitStack() as closers:
        await closers.enter_async_context(process_metrics(registry))
        thread = closers.enter_context(ThreadPoolExecutor(1, "metrics"))
        answer = _Page(registry, key, thread, connections).answer
        try:
            address = await closers.enter_async_context(
                serving(answer, connections, host, port, tls, request_s=REQUEST_S)
            )
        except OSError as error:
            raise PortInUseError(
                f"cannot bind {host}, port {port}, for metrics: {error.strerror}",
                hint="set network.metrics_host, and network.metrics_port: 0 where several services share a host",
            ) from error
        log.info("metrics at %s%s", address, PATH)
        yield f"{address}{PATH}"


class _Page:
    """Answers one request per connection."""

    def __init__(
        self, registry: CollectorRegistry, key: str | None, thread: ThreadPoolExecutor, connections: Connections
    ) -> None:
        self._registry = registry
        self._key = key
        self._thread = thread
        self._connections = connections

    async def answer(self, request: web.BaseRequest) -> web.Response:
        response = self._refused(request) or await self._written(request)
        response.force_close()
        return response

    def _refused(self, request: web.BaseRequest) -> web.Response | None:
        if self._key is not None and not is_bearer(request.headers.get("Authorization", ""), self._key):
            return web.Response(
                status=401,
                text="missing or wrong key (security.metrics_key_file)\n",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if request.path != PATH:
            return web.Response(status=404, text=f"there is only {PATH}\n")
        if request.method not in _METHODS:
            return web.Response(status=405, headers={"Allow": ", ".join(_METHODS)})
        return None

    async def _written(self, request: web.BaseRequest) -> web.Response:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        with self._connections.answering(request):
            text = await asyncio.get_running_loop().run_in_executor(self._thread, encode, self._registry)
        return web.Response(body=text, headers={"Content-Type": kind})
