"""The transport of `grpc://` and `grpcs://`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

import grpc

from rollmesh.mesh.errors import UnauthenticatedError
from rollmesh.protos import reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.client.transports.interface import CallError


class GrpcTransport:
    """Calls over a channel, which is closed with it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = reward_pb2_grpc.RewardStub(channel)

    async def score(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> reward_pb2.ScoreResponse:
        """See `Transport.score`."""
        with _errors():
            response: reward_pb2.ScoreResponse = await self._stub.Score(request, timeout=timeout_s)
            return response

    async def stream(
        self, items: Sequence[reward_pb2.ScoreItem], timeout_s: float
    ) -> AsyncGenerator[reward_pb2.ScoreResult, None]:
        """See `StreamingTransport.stream`."""
        with _errors():
            call = self._stub.ScoreStream(
                (reward_pb2.ScoreStreamRequest(item=item) for item in items), timeout=timeout_s
            )
            try:
                async for result in call:
                    yield result
            finally:
                call.cancel()

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        """See `Transport.info`."""
        with _errors():
            info: reward_pb2.InfoResponse = await self._stub.Info(reward_pb2.InfoRequest(), timeout=timeout_s)
            return info

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._channel.close()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise CallError(error.code(), error.details() or "") from error
    except UnauthenticatedError as error:
        # The caller's own grant is over. A new one may take its place; meanwhile no endpoint can be reached.
        raise CallError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
