"""The transport of `grpc://` and `grpcs://`.

Methods are called by their paths: neither generated stubs nor the package of the health service is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.transport import MAX_MESSAGE, CallError, Kind

SERVICE = "/rollmesh.v1.Reward/"
_HEALTH = "/grpc.health.v1.Health/Check"
# A HealthCheckResponse whose status is SERVING.
_SERVING = b"\x08\x01"
# Details of a call whose write met a stream that had just ended.
_WRITE_FAILED = "Internal error from Core"
_KINDS: dict[grpc.StatusCode, Kind] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "exhausted",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.PERMISSION_DENIED: "denied",
    grpc.StatusCode.UNIMPLEMENTED: "unimplemented",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
}
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE + (1 << 20)),
    ("grpc.max_receive_message_length", MAX_MESSAGE + (1 << 20)),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]

OpenChannel = Callable[[bool], grpc.aio.Channel]
"""Opens a channel to the server; true: as a caller who may call it, false: as one without credentials."""


def channels(target: str, root_certificates: bytes | None, *, tls: bool) -> OpenChannel:
    """Opens channels to `host:port`.

    Args:
        root_certificates: authorities that the server's certificate is checked by, PEM; None: the public ones.
        tls: false for plain text.
    """

    def open_channel(_trusted: bool) -> grpc.aio.Channel:
        if not tls:
            return grpc.aio.insecure_channel(target, options=OPTIONS)
        return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(root_certificates), options=OPTIONS)

    return open_channel


class GrpcTransport:
    """Calls over a channel.

    Args:
        open_channel: opens it.
        key: sent as a bearer token; empty: none.
        has_key: calls carry a credential; it may be one of the channel's own.
    """

    two_way = True

    def __init__(self, open_channel: OpenChannel, key: str = "", *, has_key: bool | None = None) -> None:
        self.has_key = bool(key) if has_key is None else has_key
        self._open = open_channel
        self._channel = open_channel(self.has_key)
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        make = self._channel.unary_unary
        self._score: Any = make(
            f"{SERVICE}Score",
            request_serializer=reward_pb2.ScoreRequest.SerializeToString,
            response_deserializer=reward_pb2.ScoreResponse.FromString,
        )
        self._info: Any = make(
            f"{SERVICE}Info",
            request_serializer=reward_pb2.InfoRequest.SerializeToString,
            response_deserializer=reward_pb2.InfoResponse.FromString,
        )
        self._health: Any = make(_HEALTH)
        self._stream: Any = self._channel.stream_stream(
            f"{SERVICE}ScoreStream",
            request_serializer=reward_pb2.ScoreStreamRequest.SerializeToString,
            response_deserializer=reward_pb2.ScoreResult.FromString,
        )

    async def connect(self, timeout_s: float) -> None:
        """See `Transport.connect`."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), timeout_s)
        except TimeoutError:
            raise CallError("unavailable", "UNAVAILABLE", f"nothing speaks gRPC there within {timeout_s:g} s") from None

    async def score(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> reward_pb2.ScoreResponse:
        """See `Transport.score`."""
        with _errors():
            response: reward_pb2.ScoreResponse = await self._score(request, timeout=timeout_s, metadata=self._metadata)
            return response

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        """See `Transport.info`."""
        with _errors():
            request = reward_pb2.InfoRequest()
            info: reward_pb2.InfoResponse = await self._info(request, timeout=timeout_s, metadata=self._metadata)
            return info

    async def health(self, timeout_s: float) -> str:
        """See `Transport.health`."""
        with _errors():
            answer: bytes = await self._health(b"", timeout=timeout_s, metadata=self._metadata)
            return "" if answer == _SERVING else "the health service does not say SERVING"

    def stream(self, timeout_s: float) -> GrpcStream:
        """See `Transport.stream`."""
        return GrpcStream(self._stream(timeout=timeout_s, metadata=self._metadata))

    def with_key(self, key: str) -> GrpcTransport:
        """See `Transport.with_key`."""
        return GrpcTransport(self._open, key, has_key=False)

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._channel.close()


class GrpcStream:
    """See `transport.Stream`."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, request: reward_pb2.ScoreStreamRequest) -> None:
        """See `Stream.send`."""
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The error of a write says that the stream has ended; its status says why.
            raise _call_error(await self._call.code(), await self._call.details()) from error

    async def close(self) -> None:
        """See `Stream.close`."""
        with _errors():
            await self._call.done_writing()

    async def results(self) -> AsyncIterator[reward_pb2.ScoreResult]:
        """See `Stream.results`."""
        with _errors():
            while (result := await self._call.read()) is not grpc.aio.EOF:
                yield result

    def cancel(self) -> None:
        """See `Stream.cancel`."""
        self._call.cancel()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _call_error(error.code(), error.details()) from error


def _call_error(code: grpc.StatusCode, details: str | None) -> CallError:
    if details == _WRITE_FAILED:
        details = "the server ended the stream, and its reason was lost"
    return CallError(_KINDS.get(code, "failed"), code.name, details or "")
