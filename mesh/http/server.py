"""Parts that all HTTP servers of the mesh share: their start and end, keys, a log that strangers cannot fill.

Invariant: a key is a bearer token, which opens nothing else of the mesh.
"""

from __future__ import annotations

import hmac
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rollmesh.mesh.access.secret_files import read_key
from rollmesh.mesh.addresses import is_unspecified, join_address
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.http.connections import Connections
from rollmesh.mesh.runtime.hosts import is_loopback


def _is_ours(record: logging.LogRecord) -> bool:
    """False for records of requests that cannot be parsed: strangers send them, and they are answered anyway."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


# For servers of aiohttp.
log = logging.getLogger(__name__)
log.addFilter(_is_ours)
# Seconds that running answers get at the end.
_CLOSE_S = 1.0


@asynccontextmanager
async def serving(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    connections: Connections,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    *,
    request_s: float,
) -> AsyncIterator[str]:
    """Answers requests while the context lasts; yields a URL of it for this host, `http://HOST:PORT` or of https.

    Args:
        answer: to one request.
        connections: of this server.
        host, port: to bind; port 0: a free one.
        tls: None: without.
        request_s: seconds that a connection has for its request, and may be idle.

    Raises:
        OSError: the address cannot be bound.
    """
    server = web.Server(
        answer,
        handler_cancellation=True,
        logger=log,
        access_log=None,
        keepalive_timeout=request_s,
        lingering_time=0.0,
    )
    bound = await connections.listen(server, host, port, tls)
    try:
        # Browsers do not open the address of all interfaces.
        shown = ("::1" if ":" in host else "localhost") if is_unspecified(host) else host
        yield f"{'https' if tls else 'http'}://{join_address(shown, bound)}"
    finally:
        await connections.close()
        await server.shutdown(_CLOSE_S)


def http_key(path: Path | None, setting: str, host: str, what: str, security: SecuritySection) -> str | None:
    """The key that callers must send; empty on loopback without one, with a warning if the mesh has a token.

    Args:
        path: of the file with the key.
        setting: that names it, for errors and the log.
        host: address to bind.
        what: is served, for errors and the log.

    Raises:
        ConfigError: a non-loopback address without a key; an unreadable key.
    """
    if path is not None:
        return read_key(path, setting)
    if not is_loopback(host) and not security.allow_insecure:
        raise ConfigError(
            f"refusing to serve {what} at {host}: others could use it without a key",
            hint=f"set {setting} to a file that rollmesh token new makes, or security.allow_insecure: true",
        )
    if security.token_file is not None:
        log.warning("%s: any program that reaches %s may use it without a key; set %s", what, host, setting)
    return None


def is_bearer(authorization: str, key: str) -> bool:
    """True if a request's header `Authorization` holds the key; takes the same time for any header."""
    given = authorization.removeprefix("Bearer ")
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())
