"""Whose connection is closed where there are too many, and what has no end by itself."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from aiohttp import web

from rollmesh.mesh.access.tls import server_context
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.http import connections
from rollmesh.mesh.http.connections import Connections
from tests.certificates import Authority

MOST = 4
_DEADLINE_S = 240.0
_REQUEST = b"GET /%s HTTP/1.1\r\nHost: here\r\n\r\n"
# Services run in the second kind of loop.
LOOPS = [asyncio.run, uvloop.run]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


class Serving:
    """A server whose answers at `/held` wait for `let_go`."""

    def __init__(self, tls: ssl.SSLContext | None, client: ssl.SSLContext | None) -> None:
        self._tls, self._client = tls, client
        self._clients = AsyncExitStack()
        self.connections = Connections(MOST)
        self.held, self.let_go = asyncio.Event(), asyncio.Event()
        self.port = 0

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        with self.connections.answering(request):
            if request.path == "/held":
                self.held.set()
                await self.let_go.wait()
            return web.Response(text="answered")

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        server = web.Server(self._answer, handler_cancellation=True, access_log=None)
        self.port = await self.connections.listen(server, "127.0.0.1", 0, self._tls)
        async with self._clients, asyncio.timeout(_DEADLINE_S):
            yield
        await self.connections.close()
        await server.shutdown(1.0)

    async def stranger(self) -> asyncio.StreamReader:
        """Connects and says nothing: where there is TLS, its handshake does not begin."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._clients.callback(writer.close)
        return reader

    async def asking(self, path: bytes) -> asyncio.StreamReader:
        """Sends a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self._client)
        self._clients.callback(writer.close)
        writer.write(_REQUEST % path)
        return reader


async def _closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        assert await reader.read() == b""


async def _answered(reader: asyncio.StreamReader) -> None:
    assert (await reader.readuntil(b"answered")).startswith(b"HTTP/1.1 200")


@pytest.fixture(params=["plain", "TLS"])
def serving(request: pytest.FixtureRequest, authority: Authority) -> Callable[[], Serving]:
    if request.param == "plain":
        return lambda: Serving(None, None)
    cert, key = authority.certify("service")
    client = ssl.create_default_context(cafile=str(authority.pem))
    client.check_hostname = False
    return lambda: Serving(server_context(SecuritySection(tls_cert=cert, tls_key=key)), client)


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.mark.parametrize("run", LOOPS)
def test_of_too_many_the_oldest_that_is_not_being_answered_is_closed(serving: Callable[[], Serving], run: Run) -> None:
    async def flood() -> None:
        world = serving()
        async with world.up():
            first = await world.asking(b"held")
            await world.held.wait()
            strangers = [await world.stranger() for _ in range(3 * MOST)]
            for reader in strangers[: 1 - MOST]:
                await _closed(reader)
            assert not any(reader.at_eof() for reader in strangers[1 - MOST :])
            await _answered(await world.asking(b"now"))
            await _closed(strangers[1 - MOST])
            world.let_go.set()
            await _answered(first)

    run(flood())


@pytest.mark.parametrize("run", LOOPS)
def test_where_all_are_being_answered_new_ones_are_refused(serving: Callable[[], Serving], run: Run) -> None:
    async def crowd() -> None:
        world = serving()
        async with world.up():
            readers = []
            for _ in range(MOST):
                world.held.clear()
                readers.append(await world.asking(b"held"))
                await world.held.wait()
            await _closed(await world.stranger())
            world.let_go.set()
            for reader in readers:
                await _answered(reader)
            await _answered(await world.asking(b"now"))

    run(crowd())


@pytest.mark.parametrize("run", LOOPS)
def test_a_handshake_that_does_not_end_is_ended(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)
    cert, key = authority.certify("slow")

    async def wait() -> None:
        world = Serving(server_context(SecuritySection(tls_cert=cert, tls_key=key)), None)
        before = len(os.listdir("/proc/self/fd"))
        async with world.up():
            for reader in [await world.stranger() for _ in range(MOST - 1)]:
                await _closed(reader)
            plain = await world.asking(b"now")
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await _answered(plain)
        # The loop has opened some of its own meanwhile.
        assert len(os.listdir("/proc/self/fd")) < before + MOST

    run(wait())
