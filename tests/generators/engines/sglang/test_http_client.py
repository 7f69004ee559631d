"""Connections to a server, as the client keeps and leaves them."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.sglang import http_client, load_monitor
from rollmesh.generators.engines.sglang.http_client import HttpClient
from rollmesh.generators.engines.sglang.load_monitor import LoadMonitor

_DEADLINE_S = 240.0


async def no_cause() -> str:
    """The cause of a broken connection: none is known."""
    return ""


def test_a_connection_is_left_before_the_server_would_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request on a connection that is being closed would be lost, and the engine with it."""
    monkeypatch.setattr(http_client, "IDLE_S", 0.05)

    async def run() -> None:
        left = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                if line == b"\r\n":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
            left.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            asking = HttpClient(f"http://127.0.0.1:{port}", no_cause)
            try:
                assert await asking.get("/health") == {}
                await asyncio.wait_for(left.wait(), _DEADLINE_S)
                assert await asking.get("/health") == {}
            finally:
                await asking.close()

    asyncio.run(run())


def _server(answer: str, kind: str = "application/json") -> TestServer:
    """One that answers everything alike."""

    async def handle(_: web.Request) -> web.Response:
        return web.Response(text=answer, content_type=kind)

    application = web.Application()
    application.router.add_route("*", "/{name}", handle)
    return TestServer(application)


def test_an_answer_that_cannot_be_read_is_an_error_of_the_server() -> None:
    async def run() -> None:
        async with _server("{half") as address:
            asking = HttpClient(str(address.make_url("/")), no_cause)
            try:
                with pytest.raises(EngineError, match="/server_info"):
                    await asking.get("/server_info")
            finally:
                await asking.close()

    asyncio.run(run())


def test_load_metrics_of_another_form_do_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server lives without them; that it dies must still be seen."""
    monkeypatch.setattr(load_monitor, "_EVERY_S", 0.01)

    async def run() -> None:
        silence: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        address = _server('{"loads": [{"token_usage": null}]}')
        await address.start_server()
        asking = HttpClient(str(address.make_url("/")), no_cause)
        watch = LoadMonitor(asking, "/loads", silence.set_result)
        watch.start()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                while "not understood" not in caplog.text:
                    await asyncio.sleep(0.01)
            assert not silence.done()
            await address.close()
            assert "does not answer" in await asyncio.wait_for(silence, _DEADLINE_S)
        finally:
            await watch.stop()
            await asking.close()
            await address.close()

    asyncio.run(run())
