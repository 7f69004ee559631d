"""A TCP proxy in front of a service that cuts, blackholes, delays and throttles on command, for each client alone.

Clients share one port per service, since a service tells all the same address; the kernel says which process connects
(`tests.faults.processes`).

Invariants: bytes are forwarded in order or not at all. A blackholed connection stays open on both sides and nothing
passes, as with a dead link. When it is healed, bytes that a delay or a blackhole held back pass, as with a link that
came back before TCP gave up. A cut ends connections with RST, and refuses new ones in the same way until it is healed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Mode = Literal["open", "cut", "blackhole"]
_CHUNK_BYTES = 64 << 10
# Chunks on their way in one direction; more stay with the sender.
_HELD_CHUNKS = 64
_CALL_S = 10.0
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The behaviour of a link.

    Attributes:
        mode: `open` forwards, `cut` resets, `blackhole` keeps everything back.
        delay_s: seconds by which every byte is late, in each direction.
        bytes_per_s: bandwidth in each direction; 0 is unlimited.
    """

    mode: Mode = "open"
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


class _Connection:
    """One client's connection and what its link does at present."""

    def __init__(self, client: str, conditions: Conditions) -> None:
        self.client = client
        self.flowing = asyncio.Event()
        self.ends: list[asyncio.StreamWriter] = []
        self.set(conditions)

    def set(self, conditions: Conditions) -> None:
        self.conditions = conditions
        if conditions.mode == "cut":
            for end in self.ends:
                _reset(end)
        if conditions.mode == "blackhole":
            self.flowing.clear()
        else:
            self.flowing.set()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: a part that stamps what arrives, and a part that passes it on when it is due."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD_CHUNKS)
        clock = asyncio.get_running_loop().time

        async def fill() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(_CHUNK_BYTES)
                except OSError:
                    data = b""
                await held.put((clock() + self.conditions.delay_s, data))

        filling = asyncio.create_task(fill())
        try:
            while True:
                due, data = await held.get()
                if (late := due - clock()) > 0:
                    await asyncio.sleep(late)
                if not data:
                    await self.flowing.wait()
                    return
                await self._pass(writer, data)
        except OSError:
            pass  # either side has gone
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)

    async def _pass(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        offset = 0
        while offset < len(data):
            await self.flowing.wait()
            rate = self.conditions.bytes_per_s
            piece = data[offset : offset + (max(1, int(rate / 20)) if rate else len(data))]
            writer.write(piece)
            await writer.drain()
            offset += len(piece)
            if rate:
                await asyncio.sleep(len(piece) / rate)


class Link:
    """One listening port that forwards to a service; public methods may be called from any thread.

    Args:
        loop: runs the link.
        upstream: (host, port) of the service.
        who: names the client of a connection by the ports on either side, as `service-number`; '' where it is unknown.
    """

    def __init__(self, loop: ProxyLoop, upstream: tuple[str, int], who: Callable[[int, int], str]) -> None:
        self._loop = loop
        self._upstream = upstream
        self._who = who
        self._rules: dict[str, Conditions] = {}
        self._usual: dict[str, Conditions] = {}
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> Link:
        """Listens on a free port."""
        self._loop.call(self._start())
        return self

    def apply(self, client: str, conditions: Conditions) -> None:
        """Changes the link at once, for open and new connections.

        Args:
            client: a process (`generator-0-2`), a service (`generator-0`), or `*` for everyone.
            conditions: of that client's connections.
        """
        self._loop.call(self._apply(client, conditions))

    def usually(self, client: str, conditions: Conditions) -> None:
        """Says what a client's link is like while nothing else is applied to it."""
        self._usual[client] = conditions

    def close(self) -> None:
        """Ends every connection and the port."""
        self._loop.call(self._close())

    def conditions(self, client: str) -> Conditions:
        """The rule for a client: the rule of the process, else of its service, else of everyone, else the usual."""
        for rules in (self._rules, self._usual):
            for name in (client, client.rpartition("-")[0], "*"):
                if name in rules:
                    return rules[name]
        return Conditions()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _apply(self, client: str, conditions: Conditions) -> None:
        self._rules[client] = conditions
        if conditions == Conditions():
            del self._rules[client]
        for connection in list(self._open):
            now = self.conditions(connection.client)
            if now != connection.conditions:
                connection.set(now)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._open):
            connection.set(Conditions("cut"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Reads /proc, during which nothing else would be forwarded.
            client = await asyncio.to_thread(self._who, writer.get_extra_info("peername")[1], self.port)
            await self._connect(client, reader, writer)
        except OSError:
            pass  # the service is away: the client sees its connection end
        except asyncio.CancelledError:
            pass  # the link closes; asyncio's server would log a cancelled handler as a failure
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _connect(self, client: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connects a client with the service until either leaves."""
        connection = _Connection(client, self.conditions(client))
        connection.ends.append(writer)
        self._open.add(connection)
        try:
            if connection.conditions.mode == "cut":
                _reset(writer)
                return
            await connection.flowing.wait()
            far_reader, far = await asyncio.open_connection(*self._upstream)
            connection.ends.append(far)
            for end in connection.ends:
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ways = [asyncio.create_task(connection.forward(*way)) for way in ((reader, far), (far_reader, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            self._open.discard(connection)
            for end in connection.ends:
                end.close()


class ProxyLoop:
    """The thread in which links run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the thread and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    def link(self, port: int, who: Callable[[int, int], str] = lambda _client, _link: "") -> Link:
        """A new link to a service on this machine, listening; `who` names clients by the ports of their connections."""
        return Link(self, ("127.0.0.1", port), who).start()

    def close(self) -> None:
        """Ends the thread; links are closed by their owners."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
