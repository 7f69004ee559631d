"""A server of the contract that forwards to another one, and spoils calls.

Messages pass as bytes. A cut ends the server with all its connections, and starts it again at the same port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.grpc_transport import OPTIONS, SERVICE, OpenChannel
from rollmesh.reward_service.conformance.proxy.faults import CallFaults, Counts, Faults

_HEALTH = "grpc.health.v1.Health"
# Seconds over which results are spread to come in another order.
_SPREAD_S = 0.02
# Seconds that a call without a deadline waits for an answer that never comes.
_LONGEST_S = 3600.0

_Metadata = Sequence[tuple[str, str | bytes]]


class FaultProxy:
    """Forwards Score, ScoreStream, Info and health checks; the first two with faults.

    Args:
        open_channel: opens the channel to the server.
        faults: to be met.

    Attributes:
        port: where it listens; 0 until it does.
        counts: of faults so far.
    """

    def __init__(self, open_channel: OpenChannel, faults: Faults) -> None:
        self.faults = faults
        self.counts = Counts()
        self.port = 0
        self._channel = open_channel(True)
        self._host = ""
        self._server: grpc.aio.Server | None = None
        self._cutting: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens, and returns the port.

        Raises:
            RuntimeError: the port is taken.
        """
        service = SERVICE.strip("/")
        server = grpc.aio.server(options=[*OPTIONS, ("grpc.so_reuseport", 0)])
        score: Any = grpc.unary_unary_rpc_method_handler(self._score)
        methods: dict[str, Any] = {
            "Score": score,
            "ScoreStream": grpc.stream_stream_rpc_method_handler(self._stream),
            "Info": grpc.unary_unary_rpc_method_handler(self._plain(f"{SERVICE}Info")),
        }
        health: dict[str, Any] = {"Check": grpc.unary_unary_rpc_method_handler(self._plain(f"/{_HEALTH}/Check"))}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(service, methods),
                grpc.method_handlers_generic_handler(_HEALTH, health),
            )
        )
        self._host, self.port = host, server.add_insecure_port(f"{host}:{port}")
        await server.start()
        self._server = server
        return self.port

    async def stop(self) -> None:
        """Cuts all connections and ends."""
        if self._cutting is not None:
            self._cutting.cancel()
            await asyncio.gather(self._cutting, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0)
        await self._channel.close()

    def _begin(self) -> CallFaults:
        """Counts a call, and decides about it."""
        faults = self.counts.meet(self.faults)
        if faults.cuts and (self._cutting is None or self._cutting.done()):
            self.counts.cuts += 1
            self._cutting = asyncio.create_task(self._cut())
        return faults

    async def _cut(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
            await self.start(self._host, self.port)

    def _plain(self, path: str) -> Any:
        """A handler that forwards one method without faults."""

        async def handle(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return await self._forward(path, request, context)

        return handle

    async def _score(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        faults = self._begin()
        if faults.fails:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a fault of the proxy")
        if faults.repeats:
            await self._forward(f"{SERVICE}Score", request, context)
        answer = await self._forward(f"{SERVICE}Score", request, context)
        if faults.drops:
            await _until_the_end(context)
        await asyncio.sleep(faults.delay_s)
        return self._spoiled(answer, faults)

    def _spoiled(self, answer: bytes, faults: CallFaults) -> bytes:
        if not self.faults.lose and not self.faults.reorder:
            return answer
        response = reward_pb2.ScoreResponse.FromString(answer)
        results = [result for result in response.results if faults.chance.random() >= self.faults.lose]
        self.counts.lost_results += len(response.results) - len(results)
        if self.faults.reorder:
            faults.chance.shuffle(results)
        return reward_pb2.ScoreResponse(results=results).SerializeToString()

    async def _forward(self, path: str, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        call: Any = self._channel.unary_unary(path)
        try:
            answer: bytes = await call(request, timeout=context.time_remaining(), metadata=_credentials(context))
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        return answer

    async def _stream(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        faults = self._begin()
        if faults.fails:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a fault of the proxy")
        method: Any = self._channel.stream_stream(f"{SERVICE}ScoreStream")
        sent: list[bytes] = []

        async def noted() -> AsyncIterator[bytes]:
            async for request in requests:
                sent.append(request)
                yield request

        call = method(noted(), timeout=context.time_remaining(), metadata=_credentials(context))
        ready: asyncio.Queue[bytes | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(call, faults, ready))
        try:
            while (result := await ready.get()) is not None:
                yield result
            await reading
            if faults.repeats:
                again = method(iter(sent), timeout=context.time_remaining(), metadata=_credentials(context))
                async for _ in again:
                    pass
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        finally:
            reading.cancel()
            call.cancel()
        if faults.drops:
            await _until_the_end(context)

    async def _read(self, call: Any, faults: CallFaults, ready: asyncio.Queue[bytes | None]) -> None:
        """Reads results of a stream; each becomes ready after its own delay."""
        spread = max(self.faults.delay_s, _SPREAD_S if self.faults.reorder else 0.0)

        async def later(result: bytes, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            ready.put_nowait(result)

        try:
            async with asyncio.TaskGroup() as group:
                async for result in call:
                    if faults.drops or faults.chance.random() < self.faults.lose:
                        self.counts.lost_results += 1
                        continue
                    group.create_task(later(result, faults.chance.uniform(0, spread)))
        except* grpc.aio.AioRpcError as several:
            raise several.exceptions[0] from None
        finally:
            ready.put_nowait(None)


def _credentials(context: grpc.aio.ServicerContext[bytes, bytes]) -> _Metadata:
    given: Any = context.invocation_metadata() or ()
    return [(key, value) for key, value in given if key == "authorization"]


async def _until_the_end(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    """Waits until the caller has had enough; a call without a deadline ends with its connection."""
    left = context.time_remaining()
    # gRPC cancels the handler when the connection is lost.
    await asyncio.sleep(_LONGEST_S if left is None else left)
