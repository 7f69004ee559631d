"""A TCP port, with TLS or without, before a Redis on a Unix socket."""

from __future__ import annotations

import asyncio
import ssl

from rollmesh.mesh.config.redis_url import parse_redis_url


class Proxy:
    """Stands before Redis' socket at a port: ends TLS where asked to, and lets bytes through while `free` is set."""

    def __init__(self, redis_url: str, context: ssl.SSLContext | None = None) -> None:
        address = parse_redis_url(redis_url)
        self._behind, self._login = address.path, f"{address.username}:{address.password}@"
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self.free = asyncio.Event()
        self.free.set()
        self.port = 0

    def url(self, scheme: str = "redis") -> str:
        """The address of Redis through this proxy, with the same login."""
        return f"{scheme}://{self._login}127.0.0.1:{self.port}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_unix_connection(self._behind)
        for pair in ((reader, back_writer), (back_reader, writer)):
            self._tasks.add(asyncio.create_task(self._carry(*pair)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self.free.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
