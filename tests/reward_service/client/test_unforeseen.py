"""A transport that fails in a way that it should not: typed errors, pauses, and no item that waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.client import CallLimits
from rollmesh.reward_service.client.dispatcher import Dispatcher


class Odd:
    """A transport with an error of its own."""

    def __init__(self, *, describes: bool) -> None:
        self.describes = describes
        self.described = self.asked = 0

    async def score(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> reward_pb2.ScoreResponse:
        self.asked += 1
        raise OverflowError("odd")

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        self.described += 1
        if not self.describes:
            raise OverflowError("odd")
        return reward_pb2.InfoResponse()

    async def close(self) -> None:
        """Has nothing to close."""


async def test_a_call_that_fails_oddly_ends_its_items(make_item: Any) -> None:
    odd = Odd(describes=True)
    dispatcher = Dispatcher(["grpc://a:1"], lambda _: odd, CallLimits(attempts=2))
    (result,) = await asyncio.wait_for(dispatcher.score([make_item()], timeout_s=100), 50)
    assert (result.error.code, odd.asked) == ("endpoint", 2)
    assert "OverflowError: odd" in result.error.message
    await dispatcher.close()


async def test_a_server_that_is_described_oddly_is_asked_after_pauses(make_item: Any) -> None:
    odd = Odd(describes=False)
    dispatcher = Dispatcher(["grpc://a:1"], lambda _: odd, CallLimits())
    (result,) = await dispatcher.score([make_item()], timeout_s=0.5)
    assert result.error.code == "unreachable"
    assert 1 <= odd.described < 20
    await dispatcher.close()
