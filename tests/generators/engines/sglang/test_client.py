"""Connections to a server, as the client keeps and leaves them."""

from __future__ import annotations

import asyncio

import pytest

from generators.engines.sglang import client
from generators.engines.sglang.client import Client

_DEADLINE_S = 30.0


def test_a_connection_is_left_before_the_server_would_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request on a connection that is being closed would be lost, and the engine with it."""
    monkeypatch.setattr(client, "IDLE_S", 0.05)

    async def run() -> None:
        left = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                if line == b"\r\n":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
            left.set()
            writer.close()

        async def no_cause() -> str:
            return ""

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            asking = Client(f"http://127.0.0.1:{port}", no_cause)
            try:
                assert await asking.get("/health") == {}
                await asyncio.wait_for(left.wait(), _DEADLINE_S)
                assert await asking.get("/health") == {}
            finally:
                await asking.close()

    asyncio.run(run())
