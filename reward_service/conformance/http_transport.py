"""The transport of `http://` and `https://`: the same messages as JSON, by the standard library alone.

`POST BASE/v1/score` takes a ScoreRequest and answers with a ScoreResponse, `GET BASE/v1/info` with an InfoResponse.
`POST BASE/v1/score?stream` answers with a ScoreResult in each row. The deadline travels in a header, in milliseconds.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

from google.protobuf import json_format
from google.protobuf.message import Message

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.transport import MAX_MESSAGE, TIMEOUT_HEADER, CallError, Kind

_KINDS: dict[int, Kind] = {
    **dict.fromkeys((408, 504), "deadline"),
    **dict.fromkeys((429, 503), "busy"),
    **dict.fromkeys((404, 405, 501), "unimplemented"),
    **dict.fromkeys((400, 415, 422), "invalid"),
    401: "unauthenticated",
    403: "denied",
    413: "exhausted",
}
# Calls at a time: one thread each.
_MOST_CALLS = 32
_SHOWN = 300
_CHUNK = 1 << 16

_Answer = TypeVar("_Answer", bound=Message)
_T = TypeVar("_T")


class HttpTransport:
    """Calls over kept connections.

    Args:
        base: `http://host:port/path` or `https://...`.
        key: sent as a bearer token; empty: none.
        tls: how the certificate of `https://` is checked.
    """

    two_way = False

    def __init__(self, base: str, key: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.has_key = bool(key)
        self._base, self._key, self._tls = base.rstrip("/"), key, tls
        self._url = urlsplit(self._base)
        self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="kit-http")
        self._idle: list[http.client.HTTPConnection] = []
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    async def connect(self, timeout_s: float) -> None:
        """See `Transport.connect`."""
        try:
            await self.info(timeout_s)
        except CallError as error:
            if error.kind in ("unavailable", "garbled", "deadline"):
                raise

    async def score(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> reward_pb2.ScoreResponse:
        """See `Transport.score`."""
        return await self._call("POST", "/v1/score", _json(request), timeout_s, reward_pb2.ScoreResponse())

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        """See `Transport.info`."""
        return await self._call("GET", "/v1/info", None, timeout_s, reward_pb2.InfoResponse())

    async def health(self, timeout_s: float) -> str:
        """See `Transport.health`: a server that gives Info is well."""
        await self.info(timeout_s)
        return ""

    def stream(self, timeout_s: float) -> HttpStream:
        """See `Transport.stream`."""
        connection = self._opened()

        def send(body: bytes) -> None:
            self._send(connection, "POST", "/v1/score?stream", body, timeout_s)

        return HttpStream(connection, send, self._threads, timeout_s)

    def with_key(self, key: str) -> HttpTransport:
        """See `Transport.with_key`."""
        return HttpTransport(self._base, key, self._tls)

    async def close(self) -> None:
        """See `Transport.close`."""
        while self._idle:
            self._idle.pop().close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float, into: _Answer) -> _Answer:
        connection, kept = self._connection()
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, self._exchange, connection, method, path, body, timeout_s
        )
        try:
            status, answer = await asyncio.wait_for(work, timeout_s)
        except TimeoutError:
            _abandon(connection)
            raise CallError("deadline", "no answer", f"none within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            _abandon(connection)
            raise
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if kept and isinstance(error, http.client.RemoteDisconnected | ConnectionError):
                # An idle connection that the server had closed; `kept` ones run out.
                return await self._call(method, path, body, timeout_s, into)
            raise CallError("unavailable", "no connection", f"{type(error).__name__}: {error}") from error
        self._idle.append(connection)
        if status != 200:
            raise _refusal(status, answer)
        return _read(answer, into)

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        return (self._idle.pop(), True) if self._idle else (self._opened(), False)

    def _opened(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "https":
            return http.client.HTTPSConnection(host, port, context=self._tls)
        return http.client.HTTPConnection(host, port)

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """One exchange, in a thread."""
        self._send(connection, method, path, body, timeout_s)
        response = connection.getresponse()
        return response.status, response.read(MAX_MESSAGE)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> None:
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        headers = self._headers | {TIMEOUT_HEADER: str(max(1, round(timeout_s * 1000)))}
        connection.request(method, self._url.path + path, body, headers)


class HttpStream:
    """See `transport.Stream`: one request with all items, sent when the caller closes its side.

    Args:
        connection: of this stream alone.
        send: sends a body over it, in a thread.
        threads: for that, and to read rows.
        timeout_s: from its opening.
    """

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        send: Callable[[bytes], None],
        threads: ThreadPoolExecutor,
        timeout_s: float,
    ) -> None:
        self._connection, self._send, self._threads = connection, send, threads
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._ends = self._loop.time() + timeout_s
        self._request = reward_pb2.ScoreRequest()

    async def send(self, request: reward_pb2.ScoreStreamRequest) -> None:
        """See `Stream.send`; items alone."""
        self._request.items.append(request.item)

    async def close(self) -> None:
        """See `Stream.close`."""
        await self._in_thread(self._send, _json(self._request))

    async def results(self) -> AsyncIterator[reward_pb2.ScoreResult]:
        """See `Stream.results`."""
        response = await self._in_thread(self._connection.getresponse)
        if response.status != 200:
            raise _refusal(response.status, await self._in_thread(response.read, _SHOWN))
        rows = rows_of(response)
        while (row := await self._in_thread(next, rows, None)) is not None:
            yield _read(row, reward_pb2.ScoreResult())
        self._connection.close()

    def cancel(self) -> None:
        """See `Stream.cancel`."""
        _abandon(self._connection)

    async def _in_thread(self, work: Callable[..., _T], *arguments: object) -> _T:
        try:
            async with asyncio.timeout_at(self._ends):
                return await self._loop.run_in_executor(self._threads, work, *arguments)
        except TimeoutError:
            _abandon(self._connection)
            raise CallError("deadline", "no end", f"none within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            _abandon(self._connection)
            raise
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise CallError("unavailable", "no connection", f"{type(error).__name__}: {error}") from error


def rows_of(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The rows of an answer, as they come.

    Raises:
        OSError, http.client.HTTPException: it has broken off.
    """
    rest = b""
    # `readline` would take a lost connection for the end.
    while chunk := response.read1(_CHUNK):
        *rows, rest = (rest + chunk).split(b"\n")
        yield from rows
    if response.length:
        raise http.client.IncompleteRead(rest, response.length)
    if rest:
        yield rest


def _json(request: reward_pb2.ScoreRequest) -> bytes:
    return json_format.MessageToJson(request, preserving_proto_field_name=True, indent=None).encode()


def _read(content: bytes, into: _Answer) -> _Answer:
    try:
        return json_format.Parse(content, into, ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CallError("garbled", "HTTP 200", f"what came is no {into.DESCRIPTOR.name}: {error}") from error


def _refusal(status: int, answer: bytes) -> CallError:
    words = answer[:_SHOWN].decode(errors="replace").strip()
    return CallError(_KINDS.get(status, "failed"), f"HTTP {status}", words)


def _abandon(connection: http.client.HTTPConnection) -> None:
    """Ends an exchange in another thread: the server sees the connection end."""
    if connection.sock is not None:
        with suppress(OSError):  # It has just ended by itself.
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
