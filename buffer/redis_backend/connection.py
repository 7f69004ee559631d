"""One multiplexed connection to Redis for the hot path: many callers, one socket, one wake-up per batch of replies.

redis-py hands out one connection per caller and awaits every reply by itself. At thousands of commands a second that is
most of a front's CPU. Here a batch of commands is packed and written at once, and its caller is woken once, when the
last of its replies has arrived.

A batch is late when it took longer than `timeout_s` and the time that its bytes need on a link of
`SLOWEST_BYTES_PER_S`. Its bytes are those that had to be sent for it, and those of answers that arrived meanwhile. So a
large payload does not run into a deadline that was meant for small commands, and yet nothing waits without one.

Invariants: replies come in the order of the commands. A connection that breaks, or answers late, fails everything that
waits on it, and the next batch opens a new one. So does one at whose end something else answers. Nothing is ever
repeated by itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import hiredis

from rollmesh.mesh.config.redis_url import RedisAddress
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import check_closed

Argument = str | bytes | int
# Rate below which a link counts as broken rather than slow.
SLOWEST_BYTES_PER_S = 1 << 20
# Looks at the clock within a deadline: a late batch is noticed a quarter of the deadline later at most.
_LOOKS = 4
# Values from this size on are sent from where they are.
_LARGE_BYTES = 8 << 10


class TlsError(ConnectionError):
    """The two sides do not agree on certificates."""


class _Batch:
    """Replies of one batch as they arrive.

    Attributes:
        sent_at: time on the loop's clock.
        ahead: bytes that were still to be sent then, this batch's included.
        received: bytes that the connection had received by then.
    """

    __slots__ = ("ahead", "expected", "future", "received", "replies", "sent_at")

    def __init__(
        self, expected: int, future: asyncio.Future[list[Any]], sent_at: float, ahead: int, received: int
    ) -> None:
        self.expected = expected
        self.replies: list[Any] = []
        self.future = future
        self.sent_at = sent_at
        self.ahead = ahead
        self.received = received


class _Protocol(asyncio.Protocol):
    """A socket and the batches that wait for replies on it; one timer watches the first of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._reader = hiredis.Reader(notEnoughData=self)
        self._waiting: deque[_Batch] = deque()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received = 0
        self._encrypted = False
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface without the base class.
        self._transport = cast(asyncio.Transport, transport)
        self._encrypted = transport.get_extra_info("ssl_object") is not None

    def send(self, commands: Sequence[Sequence[Argument]]) -> asyncio.Future[list[Any]]:
        loop, transport = self._loop, self._transport
        future: asyncio.Future[list[Any]] = loop.create_future()
        if self.lost or transport is None:
            future.set_exception(ConnectionError("connection closed"))
            return future
        parts = _packed(commands)
        ahead = transport.get_write_buffer_size() + sum(map(len, parts))
        self._waiting.append(_Batch(len(commands), future, loop.time(), ahead, self._received))
        transport.writelines(parts)
        if self._timer is None:
            self._watch()
        return future

    def _watch(self) -> None:
        """Gives up when the first batch is late; otherwise looks again when it would be."""
        self._timer = None
        if self.lost or not self._waiting:
            return
        batch, now = self._waiting[0], self._loop.time()
        size = batch.ahead + self._received - batch.received
        deadline = batch.sent_at + self._timeout_s + size / SLOWEST_BYTES_PER_S
        if now < deadline:
            # The next batch may be due before this one, so the timer does not sleep for long.
            self._timer = self._loop.call_at(min(deadline, now + self._timeout_s / _LOOKS), self._watch)
            return
        unsent = self._transport.get_write_buffer_size() if self._transport is not None else 0
        self._fail(
            TimeoutError(
                f"no answer for {now - batch.sent_at:.1f} s ({unsent} of {batch.ahead} bytes still to be sent, "
                f"{self._received - batch.received} received)"
            )
        )
        self.abort()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._reader.feed(data)
        try:
            self._take_replies()
        except (hiredis.ProtocolError, LookupError):
            self._fail(ConnectionError(f"what answers there is no Redis: it sent {data[:40]!r}"))
            self.abort()

    def _take_replies(self) -> None:
        reader, waiting = self._reader, self._waiting
        while (reply := reader.gets()) is not self:
            batch = waiting[0]
            batch.replies.append(reply)
            if len(batch.replies) == batch.expected:
                waiting.popleft()
                if not batch.future.done():
                    batch.future.set_result(batch.replies)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
        text = str(error or "connection closed by Redis")
        if isinstance(error, ssl.SSLError):
            self._fail(TlsError(text))
        elif self._encrypted and not self._received:
            # Since TLS 1.3, a server reports a missing certificate after the handshake, and may reset first.
            self._fail(TlsError(f"{text}, before the first answer: does Redis require another client certificate?"))
        else:
            self._fail(ConnectionError(text))

    def _fail(self, error: OSError) -> None:
        while self._waiting:
            batch = self._waiting.popleft()
            if not batch.future.done():
                batch.future.set_exception(type(error)(str(error)))

    @property
    def idle(self) -> bool:
        return not self._waiting

    def abort(self) -> None:
        self.lost = True
        if self._transport is not None:
            self._transport.abort()


def _packed(commands: Sequence[Sequence[Argument]]) -> list[bytes]:
    """Commands as they are sent. Values are copied once with what stands around them, large ones not at all."""
    parts: list[bytes] = []
    small: list[bytes] = []
    for command in commands:
        if command[0] == "SET" and isinstance(command[2], bytes):
            key, value = str(command[1]).encode(), command[2]
            small.append(b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(command), len(key), key, len(value)))
            if len(value) >= _LARGE_BYTES:
                parts += (b"".join(small), value)
                small = [_options(*command[3:])]
            else:
                small += (value, _options(*command[3:]))
        else:
            small.append(hiredis.pack_command(cast(Any, tuple(command))))
    if small:
        parts.append(b"".join(small))
    return parts


@lru_cache(maxsize=16)
def _options(*options: Argument) -> bytes:
    """The encoded options after a value; few are different."""
    return b"".join([b"\r\n$%d\r\n%b" % (len(o), o) for o in (str(o).encode() for o in options)]) + b"\r\n"


class RedisConnection:
    """Sends batches over one connection, which it opens when needed.

    Args:
        address: one server.
        timeout_s: deadline of a batch without many bytes, and of opening the connection.
    """

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._connection: _Protocol | None = None
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
        return await connection.send(commands)

    async def send_then(self, first: Sequence[Sequence[Argument]], then: Sequence[Sequence[Argument]]) -> list[Any]:
        """Replies to two batches, of which the second is run after the first: here that is one pipeline."""
        return await self.send([*first, *then])

    async def primaries(self) -> Sequence[RedisConnection]:
        """All servers that hold keys."""
        return (self,)

    async def home(self) -> RedisAddress:
        """The server with the run's metadata."""
        return self.address

    async def _connected(self) -> _Protocol:
        async with self._opening:
            if self._connection is None or self._connection.lost:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        self._connection = await self._open()
                except ssl.SSLError as error:
                    raise TlsError(str(error)) from error
                except TimeoutError as error:
                    if self.address.tls:
                        text = f"no handshake with {self.address} within {self._timeout_s:.1f} s: does it speak TLS?"
                        raise TlsError(text) from error
                    raise TimeoutError(f"{self.address} cannot be reached within {self._timeout_s:.1f} s") from error
            return self._connection

    async def _open(self) -> _Protocol:
        loop, address = asyncio.get_running_loop(), self.address

        def protocol() -> _Protocol:
            return _Protocol(loop, self._timeout_s)

        if address.path:
            _, connection = await loop.create_unix_connection(protocol, address.path)
        else:
            (host, port), context = address.hosts[0], tls_context(address)
            _, connection = await loop.create_connection(protocol, host, port, ssl=context)
        greeting: list[tuple[Argument, ...]] = []
        if (login := address.login()) is not None:
            greeting.append(("AUTH", *login))
        if address.client_name is not None:
            greeting.append(("CLIENT", "SETNAME", address.client_name))
        if address.db:
            greeting.append(("SELECT", address.db))
        try:
            for reply in await connection.send(greeting) if greeting else ():
                if isinstance(reply, hiredis.ReplyError):
                    raise reply
        except BaseException:  # also where the caller has no more time, or gave up
            connection.abort()
            raise
        return connection

    @property
    def idle(self) -> bool:
        """True if nothing waits for it, so that it may be closed."""
        return not self._opening.locked() and (self._connection is None or self._connection.idle)

    def close(self) -> None:
        """Drops the connection."""
        if self._connection is not None:
            self._connection.abort()


def tls_context(address: RedisAddress) -> ssl.SSLContext | None:
    """The context that checks the server's certificate and presents ours; None without TLS.

    Raises:
        ConfigError: a file cannot be read, holds no certificate or key, or is a key that others may read.
    """
    if not address.tls:
        return None
    options = address.options
    try:
        context = ssl.create_default_context(cafile=options.tls_ca)
        if options.tls_cert is not None and options.tls_key is not None:
            check_closed(options.tls_key, "buffer.redis_tls_key")
            context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"buffer.redis_tls_*: cannot use {options.tls_ca}, {options.tls_cert}, {options.tls_key}: {error}",
            hint="they are PEM files that this user may read",
        ) from error
    context.check_hostname = options.check_hostname
    return context
