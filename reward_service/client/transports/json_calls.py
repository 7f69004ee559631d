"""The transport of `http://` and `https://`: the messages of the contract as JSON (docs/reward-http.md)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import grpc

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.transports.http_calls import HttpCalls, Site
from rollmesh.reward_service.client.transports.interface import CallError
from rollmesh.reward_service.json_messages import JsonError, from_json, to_json

M = TypeVar("M", reward_pb2.ScoreResponse, reward_pb2.ScoreResult, reward_pb2.InfoResponse)


class JsonTransport:
    """Calls of the contract over HTTP."""

    def __init__(self, site: Site) -> None:
        self._calls = HttpCalls(site)

    async def score(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> reward_pb2.ScoreResponse:
        """See `Transport.score`."""
        content = await self._calls.post("/v1/score", to_json(request, defaults=False), timeout_s)
        return _read(content, reward_pb2.ScoreResponse())

    async def stream(
        self, items: Sequence[reward_pb2.ScoreItem], timeout_s: float
    ) -> AsyncGenerator[reward_pb2.ScoreResult, None]:
        """See `StreamingTransport.stream`."""
        body = to_json(reward_pb2.ScoreRequest(items=items), defaults=False)
        async with aclosing(self._calls.post_for_rows("/v1/score?stream", body, timeout_s)) as rows:
            async for row in rows:
                yield _read(row, reward_pb2.ScoreResult())

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        """See `Transport.info`."""
        return _read(await self._calls.get("/v1/info", timeout_s), reward_pb2.InfoResponse())

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._calls.close()


def _read(content: bytes, message: M) -> M:
    try:
        return from_json(content, message)
    except JsonError as error:
        kind = message.DESCRIPTOR.name
        raise CallError(grpc.StatusCode.INTERNAL, f"its answer is no {kind}: {error}") from error
