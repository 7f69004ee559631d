"""A server that keeps the contract: bad ones are made of it, one method each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2

from rollmesh.protos import reward_pb2, reward_pb2_grpc

Results = list[reward_pb2.ScoreResult]


def right(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
    """The plain score: is the response the ground truth?"""
    result = reward_pb2.ScoreResult(item_id=item.item_id)
    try:
        truth = json.loads(item.ground_truth_json)
    except ValueError as error:
        result.error.CopyFrom(reward_pb2.Error(code="bad_input", message=str(error)))
    else:
        result.scored.total = float(item.response.strip() == str(truth))
    return result


class Server(reward_pb2_grpc.RewardServicer):
    """A good server; each kind of bad one overrides a method."""

    info = reward_pb2.InfoResponse(name="good", version="1", streams=True, deterministic=True)
    max_message = 65 << 20
    status: Any = health_pb2.HealthCheckResponse.SERVING

    def one(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        return right(item)

    async def all(self, items: Any) -> Results:
        return [self.one(item) for item in items]

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        return reward_pb2.ScoreResponse(results=await self.all(request.items))

    async def Info(self, request: Any, context: Any) -> reward_pb2.InfoResponse:
        return self.info

    async def ScoreStream(self, requests: Any, context: Any) -> AsyncIterator[reward_pb2.ScoreResult]:
        ready: asyncio.Queue[reward_pb2.ScoreResult | None] = asyncio.Queue()

        async def score(item: reward_pb2.ScoreItem) -> None:
            for result in await self.all([item]):
                ready.put_nowait(result)

        async def read() -> None:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    if request.HasField("item"):
                        group.create_task(score(request.item))
            ready.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (result := await ready.get()) is not None:
                yield result
        finally:
            reading.cancel()
