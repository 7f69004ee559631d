"""Bounds on the connections of an HTTP server: on their number, and on idle ones.

Invariants: a connection counts from when it is accepted, before its TLS handshake. A handshake, and the head of a
request, end within a time or are ended. Where there are too many connections, the oldest idle one is closed; if none is
idle, new ones are closed at once. A connection is never closed here while its request is being answered, however long
the answer takes. The server itself bounds that, and counts only callers that are let in.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)
# Seconds that a connection has for its TLS handshake.
HANDSHAKE_S = 10.0
# Seconds until the next try where the process has no file left for a connection.
_PAUSE_S = 1.0


class Connections:
    """Connections of one aiohttp server; the head of a request has its `keepalive_timeout` to come in.

    Args:
        most: at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # In the order in which they came; the transport when its handshake is over.
        self._opened: dict[web.RequestHandler, asyncio.Task[asyncio.Transport | None]] = {}
        self._answering: set[web.RequestHandler] = set()
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def listen(self, server: web.Server, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Serves all that connect, until `close`; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        [(family, *_, address), *_] = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        self._listening = socket.create_server(address, family=family, backlog=self._most)
        self._listening.setblocking(False)
        self._accepting = loop.create_task(self._accept(self._listening, server, tls))
        return int(self._listening.getsockname()[1])

    async def close(self) -> None:
        """Stops listening; the server itself ends requests in progress."""
        opening = [task for task in self._opened.values() if not task.done()]
        if self._accepting is not None:
            opening.append(self._accepting)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()

    @contextmanager
    def answering(self, request: web.BaseRequest) -> Iterator[None]:
        """Keeps the connection of the request open while the context lasts."""
        self._answering.add(request.protocol)
        try:
            yield
        finally:
            self._answering.discard(request.protocol)

    async def _accept(self, listening: socket.socket, server: web.Server, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except ConnectionError:
                continue
            except OSError as error:
                log.warning("cannot take a connection at port %d: %s", listening.getsockname()[1], error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            if self._has_room(server):
                handler = server()
                self._opened[handler] = loop.create_task(self._open(accepted, handler, tls))
            else:
                accepted.close()
            # Where one connection follows the other, accepting never waits by itself.
            await asyncio.sleep(0)

    async def _open(
        self, accepted: socket.socket, handler: web.RequestHandler, tls: ssl.SSLContext | None
    ) -> asyncio.Transport | None:
        secured: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_S} if tls else {}
        loop = asyncio.get_running_loop()
        # A handshake that fails is a stranger's fault.
        with suppress(OSError):
            transport, _ = await loop.connect_accepted_socket(lambda: handler, accepted, **secured)
            return transport
        return None

    def _has_room(self, server: web.Server) -> bool:
        """True if another connection may open, after the oldest idle one was closed if need be."""
        if len(self._opened) < self._most:
            return True
        alive = set(server.connections)
        for handler in [each for each, opening in self._opened.items() if opening.done() and each not in alive]:
            del self._opened[handler]
        if len(self._opened) < self._most:
            return True
        idle = next((handler for handler in self._opened if handler not in self._answering), None)
        if idle is None:
            return False
        opening = self._opened.pop(idle)
        if not opening.done():
            opening.cancel()
        elif (transport := opening.result()) is not None:
            transport.abort()
        return True
