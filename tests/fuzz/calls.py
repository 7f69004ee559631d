"""Raw calls of any RPC: bytes in, bytes or a status out, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

DEADLINE_S = 240.0
# A standing stream that never ends is heard for so long.
_ENOUGH_S = 0.5
# Statuses that a service may answer to a message it does not like.
TYPED = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


# Messages of gRPC in place of the status with which a stream ended, where that came while a message was being written.
_LOST = "Internal error from Core"


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a call.

    Attributes:
        code: gRPC status; OK for a standing stream that was still open when the caller hung up.
        details: the status' words.
        messages: what came, as bytes.
    """

    code: grpc.StatusCode
    details: str
    messages: tuple[bytes, ...] = ()


def methods_of(service: ServiceDescriptor) -> list[MethodDescriptor]:
    return list(service.methods)


async def call(
    channel: grpc.aio.Channel, method: MethodDescriptor, requests: Sequence[bytes], patience_s: float = 0.05
) -> Answer:
    """Calls a method with raw requests (one of them where it is unary).

    A stream is read until it ends, until nothing has come for `patience_s`, or until it was heard for long enough. Then
    the caller hangs up.
    """
    path = f"/{method.containing_service.full_name}/{method.name}"
    received: list[bytes] = []
    try:
        if method.client_streaming and method.server_streaming:
            return await _stream(channel.stream_stream(path)(_each(requests), timeout=DEADLINE_S), patience_s)
        if method.client_streaming:
            received.append(await channel.stream_unary(path)(_each(requests), timeout=DEADLINE_S))
        elif method.server_streaming:
            return await _stream(channel.unary_stream(path)(requests[0], timeout=DEADLINE_S), patience_s)
        else:
            received.append(await channel.unary_unary(path)(requests[0], timeout=DEADLINE_S))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST:
            return Answer(grpc.StatusCode.OK, _LOST)
        return Answer(error.code(), error.details() or "")
    return Answer(grpc.StatusCode.OK, "", tuple(received))


async def _each(requests: Sequence[bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


async def _stream(stream: grpc.aio.Call, patience_s: float) -> Answer:
    received: list[bytes] = []

    async def read() -> None:
        async for message in stream:
            received.append(message)  # noqa: PERF401  what has come must be seen while the stream is open

    reader = asyncio.create_task(read())
    enough = asyncio.get_running_loop().time() + max(_ENOUGH_S, patience_s)
    try:
        while not reader.done():
            before = len(received)
            await asyncio.wait({reader}, timeout=patience_s)
            over = asyncio.get_running_loop().time() > enough
            if not reader.done() and (over or len(received) == before):
                return Answer(grpc.StatusCode.OK, "", tuple(received))
        await reader
        return Answer(await stream.code(), await stream.details(), tuple(received))
    finally:
        stream.cancel()
        await asyncio.gather(reader, return_exceptions=True)
