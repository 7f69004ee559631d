"""The transport of `http://` and `https://`: the same messages as JSON, by the standard library alone.

`POST BASE/v1/score` takes a ScoreRequest and answers with a ScoreResponse, `GET BASE/v1/info` with an InfoResponse. The
deadline travels in a header, in milliseconds.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

from google.protobuf import json_format
from google.protobuf.message import Message

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.transport import MAX_MESSAGE, TIMEOUT_HEADER, CallError, Kind, Stream

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

_Answer = TypeVar("_Answer", bound=Message)


class HttpTransport:
    """Calls over kept connections.

    Args:
        base: `http://host:port/path` or `https://...`.
        key: sent as a bearer token; empty: none.
        tls: how the certificate of `https://` is checked.
    """

    has_streams = False

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
        body = json_format.MessageToJson(request, preserving_proto_field_name=True, indent=None).encode()
        return await self._call("POST", "/v1/score", body, timeout_s, reward_pb2.ScoreResponse())

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        """See `Transport.info`."""
        return await self._call("GET", "/v1/info", None, timeout_s, reward_pb2.InfoResponse())

    async def health(self, timeout_s: float) -> str:
        """See `Transport.health`: a server that gives Info is well."""
        await self.info(timeout_s)
        return ""

    def stream(self, timeout_s: float) -> Stream:
        """See `Transport.stream`."""
        raise NotImplementedError(f"no stream over HTTP, within {timeout_s:g} s or at all")

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
            words = answer[:_SHOWN].decode(errors="replace").strip()
            raise CallError(_KINDS.get(status, "failed"), f"HTTP {status}", words)
        try:
            return json_format.Parse(answer, into, ignore_unknown_fields=True)
        except (json_format.ParseError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CallError("garbled", "HTTP 200", f"the body is no {into.DESCRIPTOR.name}: {error}") from error

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        if self._idle:
            return self._idle.pop(), True
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "https":
            return http.client.HTTPSConnection(host, port, context=self._tls), False
        return http.client.HTTPConnection(host, port), False

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """One exchange, in a thread."""
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        headers = self._headers | {TIMEOUT_HEADER: str(max(1, round(timeout_s * 1000)))}
        connection.request(method, self._url.path + path, body, headers)
        response = connection.getresponse()
        return response.status, response.read(MAX_MESSAGE)


def _abandon(connection: http.client.HTTPConnection) -> None:
    """Ends an exchange in another thread: the server sees the connection end."""
    if connection.sock is not None:
        with suppress(OSError):  # It has just ended by itself.
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
