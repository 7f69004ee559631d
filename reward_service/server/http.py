"""The reward service over HTTP: the contract's messages as JSON, by the handlers that answer over gRPC.

Invariants: a call needs the key, where there is one, before its body is read. No body is longer than an RPC message,
and it arrives within a time. No page of a browser can send one, since bodies say that they are JSON. An answer leaves
by the caller's deadline, as over gRPC.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from rollmesh.mesh.access.tls import server_context
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.scorers.http import HttpSection
from rollmesh.mesh.errors import PayloadError, PortInUseError
from rollmesh.mesh.http.connections import Connections
from rollmesh.mesh.http.server import http_key, is_bearer, serving
from rollmesh.mesh.text import bounded
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.json_messages import TIMEOUT_HEADER, JsonError, from_json, to_json
from rollmesh.reward_service.late.store import LateStoreError
from rollmesh.reward_service.late_delivery import PATH, receive
from rollmesh.reward_service.server.server import RewardServicer

log = logging.getLogger(__name__)
SCORE, INFO, HEALTH = "/v1/score", "/v1/info", "/healthz"
_METHODS = {SCORE: "POST", PATH: "POST", INFO: "GET", HEALTH: "GET"}
_JSON = "application/json"
_LINES = "application/x-ndjson"
# Seconds that a connection has for the head of its request and may be idle, and that a body has.
_REQUEST_S = 30.0
_BODY_S = 30.0
_MOST_CONNECTIONS = 128
# Longest bodies for which there is room while they arrive.
_BODIES = 4
# Longer texts are read and written in a thread: JSON holds the event loop.
_LONG = 1 << 16
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MILLISECONDS = re.compile(r"[0-9]{1,15}")
_GRPC_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")


T = TypeVar("T")


class _RefusalError(Exception):
    """A request that is not answered with a result: an HTTP status, and words."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@asynccontextmanager
async def http_server(
    servicer: RewardServicer,
    section: HttpSection,
    host: str,
    security: SecuritySection,
    *,
    max_message_mb: int,
    late_store: Path | None = None,
) -> AsyncIterator[str]:
    """Serves while the context lasts; yields the URL, empty where the configuration names no port.

    Args:
        servicer: answers.
        host: address to bind.
        max_message_mb: the longest body, in MiB.
        late_store: `reward.late.store`; None: no late reward is taken.

    Raises:
        ConfigError: a non-loopback address without a key; an unreadable key or certificate.
        PortInUseError: the address cannot be bound.
    """
    if section.port is None:
        yield ""
        return
    key = http_key(section.key_file, "reward.http.key_file", host, "rewards over HTTP", security)
    connections = Connections(_MOST_CONNECTIONS)
    answers = _Answers(servicer, key, connections, max_message_mb << 20, late_store)
    async with AsyncExitStack() as closers:
        tls = server_context(security)
        try:
            address = await closers.enter_async_context(
                serving(answers.answer, connections, host, section.port, tls, request_s=_REQUEST_S)
            )
        except OSError as error:
            raise PortInUseError(
                f"cannot bind {host}, port {section.port}, for rewards over HTTP: {error.strerror}",
                hint="set reward.http.port, 0 for any free one",
            ) from error
        log.info("rewards over HTTP at %s", address)
        yield address


class _Answers:
    """Answers requests.

    Args:
        key: that callers must send; None: none.
        most_bytes: of a body.
        late_store: of late rewards; None: there is none.
    """

    def __init__(
        self,
        servicer: RewardServicer,
        key: str | None,
        connections: Connections,
        most_bytes: int,
        late_store: Path | None,
    ) -> None:
        self._servicer = servicer
        self._key = key
        self._connections = connections
        self._most_bytes = most_bytes
        self._arriving_bytes = 0
        self._late_store = late_store

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request."""
        with self._connections.answering(request):
            try:
                self._admit(request)
                if request.path == HEALTH:
                    return web.Response(text="ok\n")
                if request.path == INFO:
                    return web.Response(body=to_json(self._servicer.describe(), defaults=True), content_type=_JSON)
                if request.path == PATH:
                    return await self._deliver(request)
                return await self._score(request)
            except _RefusalError as refusal:
                body = json.dumps({"error": {"code": refusal.status, "message": bounded(str(refusal), 2000)}})
                return web.Response(status=refusal.status, text=body, content_type=_JSON, headers=refusal.headers)

    def _admit(self, request: web.BaseRequest) -> None:
        if (method := _METHODS.get(request.path)) is None:
            raise _RefusalError(404, f"there are {SCORE}, {PATH}, {INFO} and {HEALTH}")
        if request.method != method:
            raise _RefusalError(405, f"{request.path} is for {method}", Allow=method)
        authorization = request.headers.get("Authorization", "")
        if self._key is not None and request.path != HEALTH and not is_bearer(authorization, self._key):
            raise _RefusalError(401, "missing or wrong key (reward.http.key_file there)", WWW_Authenticate="Bearer")
        if method == "POST" and request.content_type != _JSON:
            raise _RefusalError(415, f"the body has to be {_JSON}")

    async def _score(self, request: web.BaseRequest) -> web.StreamResponse:
        began = asyncio.get_running_loop().time()
        timeout_s = _timeout_of(request)
        scored = await self._read(request)
        if len({item.item_id for item in scored.items}) != len(scored.items):
            raise _RefusalError(400, "items.item_id: not unique in the request")
        remaining = None if timeout_s is None else timeout_s - (asyncio.get_running_loop().time() - began)
        if "stream" in request.query:
            return await self._stream(request, scored, remaining)
        answer = await self._servicer.answer(scored, remaining)
        body = await _off_the_loop(answer.ByteSize(), lambda: to_json(answer, defaults=True))
        return web.Response(body=body, content_type=_JSON)

    async def _deliver(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._late_store is None:
            raise _RefusalError(501, "no late rewards are taken: reward.late.store is not set there")
        content = await self._content(request)
        try:
            body = await asyncio.to_thread(receive, self._late_store, content)
        except PayloadError as error:
            raise _RefusalError(400, str(error)) from error
        except LateStoreError as error:
            raise _RefusalError(503, str(error)) from error
        return web.Response(body=body, content_type=_JSON)

    async def _stream(
        self, request: web.BaseRequest, scored: reward_pb2.ScoreRequest, remaining_s: float | None
    ) -> web.StreamResponse:
        """Sends each result as soon as it is there, a line each."""
        clock = asyncio.get_running_loop().time
        ends = None if remaining_s is None else clock() + remaining_s
        response = web.StreamResponse(headers={"Content-Type": _LINES})
        # A caller may go at any time.
        with suppress(ConnectionResetError):
            await response.prepare(request)
            stream = self._servicer.open_stream(lambda: None if ends is None else ends - clock())
            try:
                async with aclosing(self._servicer.results_of(stream, _each(scored.items))) as results:
                    async for result in results:
                        await response.write(to_json(result, defaults=True) + b"\n")
            finally:
                stream.stop()
            await response.write_eof()
        return response

    async def _read(self, request: web.BaseRequest) -> reward_pb2.ScoreRequest:
        content = await self._content(request)
        try:
            return await _off_the_loop(len(content), lambda: from_json(content, reward_pb2.ScoreRequest()))
        except JsonError as error:
            raise _RefusalError(400, f"the body is no ScoreRequest: {error}") from error

    async def _content(self, request: web.BaseRequest) -> bytes:
        content = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.content.iter_any():
                    content += chunk
                    self._arriving_bytes += len(chunk)
                    if self._arriving_bytes > _BODIES * self._most_bytes:
                        raise _RefusalError(503, "the bodies of other callers take up all room; send it again later")
                    if len(content) > self._most_bytes:
                        raise _RefusalError(413, f"the body is longer than {self._most_bytes} bytes; send fewer items")
        except TimeoutError:
            raise _RefusalError(408, f"the body did not arrive within {_BODY_S:g} s") from None
        finally:
            self._arriving_bytes -= len(content)
        return bytes(content)


async def _each(items: Iterable[reward_pb2.ScoreItem]) -> AsyncIterator[reward_pb2.ScoreStreamRequest]:
    for item in items:
        yield reward_pb2.ScoreStreamRequest(item=item)


async def _off_the_loop(size: int, work: Callable[[], T]) -> T:
    """Runs the work, of many bytes in a thread."""
    return work() if size < _LONG else await asyncio.to_thread(work)


def _timeout_of(request: web.BaseRequest) -> float | None:
    """Seconds that the caller waits: `Rollmesh-Timeout-Ms`, or gRPC's header; None where it does not say."""
    milliseconds = request.headers.get(TIMEOUT_HEADER)
    if milliseconds is not None:
        if _MILLISECONDS.fullmatch(milliseconds) is None:
            raise _RefusalError(400, f"{TIMEOUT_HEADER} is no whole number of at most 15 digits")
        return int(milliseconds) / 1000
    if (grpc_timeout := request.headers.get("grpc-timeout")) is None:
        return None
    if (parts := _GRPC_TIMEOUT.fullmatch(grpc_timeout)) is None:
        raise _RefusalError(400, "grpc-timeout is no number with one of the units H, M, S, m, u, n")
    return int(parts[1]) * _UNITS[parts[2]]
