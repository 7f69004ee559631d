"""One multiplexed connection to Redis for the hot path: many callers, one socket, one wake-up per batch of replies.

redis-py hands out one connection per caller and awaits every reply by itself; at thousands of commands a second that
is most of a front's CPU. Here a batch of commands is packed by hiredis, written at once, and its caller is woken once,
when the last of its replies has arrived.

Invariants: replies come in the order of the commands; a connection that breaks, or whose answer is late, fails
everything that waits on it, and the next batch opens a new one; nothing is ever repeated by itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import parse_url

Argument = str | bytes | int


class _Batch:
    """Replies of one batch as they arrive."""

    __slots__ = ("expected", "future", "replies")

    def __init__(self, expected: int, future: asyncio.Future[list[Any]]) -> None:
        self.expected = expected
        self.replies: list[Any] = []
        self.future = future


class _Connection(asyncio.Protocol):
    """A socket and the batches that wait for replies on it."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(notEnoughData=self)
        self._waiting: deque[_Batch] = deque()
        self._transport: asyncio.Transport | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface without the base class.
        self._transport = cast(asyncio.Transport, transport)

    def send(self, commands: Sequence[Sequence[Argument]]) -> asyncio.Future[list[Any]]:
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        if self.lost or self._transport is None:
            future.set_exception(ConnectionError("connection closed"))
            return future
        self._waiting.append(_Batch(len(commands), future))
        self._transport.write(b"".join([hiredis.pack_command(cast(Any, tuple(command))) for command in commands]))
        return future

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        reader.feed(data)
        while (reply := reader.gets()) is not self:
            batch = waiting[0]
            batch.replies.append(reply)
            if len(batch.replies) == batch.expected:
                waiting.popleft()
                if not batch.future.done():
                    batch.future.set_result(batch.replies)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        while self._waiting:
            batch = self._waiting.popleft()
            if not batch.future.done():
                batch.future.set_exception(ConnectionError(str(error or "connection closed by Redis")))

    def abort(self) -> None:
        self.lost = True
        if self._transport is not None:
            self._transport.abort()


class Wire:
    """Sends batches over one connection, which it opens when needed.

    Args:
        url: redis://, rediss:// or unix:// URL.
        timeout_s: deadline of one batch.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._where: Any = parse_url(url)
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()

    async def send(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Replies to a batch; errors of single commands are `hiredis.ReplyError` values in their places.

        Raises:
            OSError: the connection broke, or could not be opened.
            TimeoutError: no answer in time; the connection is given up.
        """
        connection = self._connection
        if connection is None or connection.lost:
            connection = await self._connected()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await connection.send(commands)
        except TimeoutError:
            connection.abort()
            raise

    async def _connected(self) -> _Connection:
        async with self._opening:
            if self._connection is None or self._connection.lost:
                async with asyncio.timeout(self._timeout_s):
                    self._connection = await self._open()
            return self._connection

    async def _open(self) -> _Connection:
        loop, where = asyncio.get_running_loop(), self._where
        if "path" in where:
            _, connection = await loop.create_unix_connection(_Connection, where["path"])
        else:
            encrypted = where.get("connection_class") is not None
            tls = ssl.create_default_context(cafile=where.get("ssl_ca_certs")) if encrypted else None
            host, port = where.get("host", "localhost"), where.get("port", 6379)
            _, connection = await loop.create_connection(_Connection, host, port, ssl=tls)
        greeting: list[tuple[Argument, ...]] = []
        if where.get("password") is not None:
            user = (where["username"],) if where.get("username") else ()
            greeting.append(("AUTH", *user, where["password"]))
        greeting.append(("SELECT", int(where.get("db", 0))))
        for reply in await connection.send(greeting):
            if isinstance(reply, hiredis.ReplyError):
                connection.abort()
                raise reply
        return connection

    def close(self) -> None:
        """Drops the connection."""
        if self._connection is not None:
            self._connection.abort()
