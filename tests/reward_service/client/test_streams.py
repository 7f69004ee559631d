"""Calls as streams: each result counts at once, and a server that fails in the middle fails only what is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.client import CallLimits, RewardClient

Requests = AsyncIterator[reward_pb2.ScoreStreamRequest]
Results = AsyncIterator[reward_pb2.ScoreResult]


@pytest.fixture(autouse=True)
def calls_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all calls are streams."""
    monkeypatch.setattr("rollmesh.reward_service.client.endpoint._MOMENT_S", -1.0)


def scored(item_id: str, total: float = 1.0) -> reward_pb2.ScoreResult:
    return reward_pb2.ScoreResult(item_id=item_id, scored=reward_pb2.Scored(total=total))


async def ones(requests: Requests) -> Results:
    async for request in requests:
        yield scored(request.item.item_id)


class Holding:
    """Answers all but items whose id begins with `held`, which wait until they are let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, requests: Requests) -> Results:
        held = []
        async for request in requests:
            if request.item.item_id.startswith("held"):
                held.append(request.item.item_id)
            else:
                yield scored(request.item.item_id)
        if held:
            await self.go.wait()
        for item_id in held:
            yield scored(item_id)


async def test_a_slow_item_holds_no_other_caller(scripted: Any, make_item: Any) -> None:
    server = await scripted()
    server.stream = holding = Holding()
    client = RewardClient([server.address])
    # Callers of one moment share a call.
    slow = asyncio.create_task(client.score([make_item("held")], timeout_s=60))
    quick = asyncio.create_task(client.score([make_item("a"), make_item("b")], timeout_s=60))
    assert [result.item_id for result in await asyncio.wait_for(quick, 120)] == ["a", "b"]
    assert server.streams == 1
    assert not slow.done()
    holding.go.set()
    assert (await asyncio.wait_for(slow, 120))[0].scored.total == 1.0
    await client.close()


async def test_calls_of_a_moment_are_made_whole(scripted: Any, make_item: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.reward_service.client.endpoint._MOMENT_S", 600.0)
    server = await scripted()
    server.stream = ones
    client = RewardClient([server.address])
    for number in range(3):
        assert (await client.score([make_item(str(number))], timeout_s=60))[0].HasField("scored")
    assert (server.streams, len(server.requests)) == (1, 2)
    # One that took longer shows that there are slow items.
    monkeypatch.setattr("rollmesh.reward_service.client.endpoint._MOMENT_S", -1.0)
    for number in range(3):
        assert (await client.score([make_item(str(number))], timeout_s=60))[0].HasField("scored")
    assert (server.streams, len(server.requests)) == (3, 3)
    await client.close()


async def test_a_server_killed_in_the_middle_of_a_stream_loses_what_is_left(scripted: Any, make_item: Any) -> None:
    doomed, spare = await scripted(), await scripted()
    doomed.stream, spare.stream = Holding(), ones
    client = RewardClient([doomed.address])
    quick = asyncio.create_task(client.score([make_item("a")], timeout_s=60))
    held = asyncio.create_task(client.score([make_item("held"), make_item("held too")], timeout_s=60))
    assert (await asyncio.wait_for(quick, 120))[0].HasField("scored")
    client.set_endpoints([doomed.address, spare.address])
    await doomed.kill()
    assert [result.scored.total for result in await asyncio.wait_for(held, 120)] == [1.0, 1.0]
    assert spare.streams == 1
    await client.close()


async def test_a_frozen_stream_costs_its_deadline_and_a_try(scripted: Any, make_item: Any) -> None:
    server = await scripted()
    server.stream = Holding()
    client = RewardClient([server.address], limits=CallLimits(timeout_s=0.5, attempts=2))
    quick, held = await asyncio.wait_for(client.score([make_item("a"), make_item("held")], timeout_s=120), 180)
    assert quick.scored.total == 1.0
    assert (held.error.code, held.error.retryable) == ("timeout", True)
    assert server.streams == 2
    await client.close()


async def test_a_stream_without_an_end_ends_with_its_last_item(scripted: Any, make_item: Any) -> None:
    async def endless(requests: Requests) -> Results:
        async for request in requests:
            yield scored(request.item.item_id)
        await asyncio.sleep(600)

    server = await scripted()
    server.stream = endless
    client = RewardClient([server.address], limits=CallLimits(timeout_s=300.0))
    for number in range(3):
        (result,) = await asyncio.wait_for(client.score([make_item(str(number))], timeout_s=300), 120)
        assert result.scored.total == 1.0
    await client.close()


async def test_second_answers_and_strangers_count_for_nothing(
    scripted: Any, make_item: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def talkative(requests: Requests) -> Results:
        names = [request.item.item_id async for request in requests]
        yield scored("stranger")
        for name in names:
            yield scored(name)
            yield scored(name, 0.0)

    server = await scripted()
    server.stream = talkative
    client = RewardClient([server.address])
    results = await asyncio.wait_for(client.score([make_item("a"), make_item("b")], timeout_s=60), 120)
    assert [result.scored.total for result in results] == [1.0, 1.0]
    assert "answered for 2 items that were not in the call, or again, such as 'stranger'" in caplog.text
    await client.close()


async def test_a_stream_that_ends_early_is_asked_again_for_the_rest(scripted: Any, make_item: Any) -> None:
    async def one_only(requests: Requests) -> Results:
        async for request in requests:
            yield scored(request.item.item_id)
            return

    server = await scripted()
    server.stream = one_only
    client = RewardClient([server.address], limits=CallLimits(attempts=2))
    results = await asyncio.wait_for(client.score([make_item(name) for name in "abc"], timeout_s=60), 120)
    outcomes = [result.error.code or result.scored.total for result in results]
    assert outcomes == [1.0, 1.0, "missing_result"]
    await client.close()


async def test_what_could_not_be_begun_waits_for_its_turn(scripted: Any, make_item: Any) -> None:
    async def one_at_a_time(requests: Requests) -> Results:
        names = [request.item.item_id async for request in requests]
        yield scored(names[0])
        for name in names[1:]:
            error = reward_pb2.Error(code="not_begun", message="busy", retryable=True)
            yield reward_pb2.ScoreResult(item_id=name, error=error)

    server = await scripted()
    server.stream = one_at_a_time
    client = RewardClient([server.address], limits=CallLimits(attempts=1))
    results = await asyncio.wait_for(client.score([make_item(name) for name in "abcde"], timeout_s=60), 120)
    assert [result.scored.total for result in results] == [1.0] * 5
    await client.close()


async def test_a_status_in_the_middle_spares_what_was_answered(scripted: Any, make_item: Any) -> None:
    class Refusing(grpc.RpcError):
        pass

    async def breaks(requests: Requests) -> Results:
        names = [request.item.item_id async for request in requests]
        yield scored(names[0])
        raise Refusing("no")

    server = await scripted()
    server.stream = breaks
    client = RewardClient([server.address], limits=CallLimits(attempts=2))
    results = await asyncio.wait_for(client.score([make_item(name) for name in "abc"], timeout_s=60), 120)
    assert [result.error.code or result.scored.total for result in results] == [1.0, 1.0, "endpoint"]
    await client.close()
