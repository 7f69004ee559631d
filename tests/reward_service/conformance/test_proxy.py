"""Faults on the way: the client loses nothing, and the same seed gives the same faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.client import CallLimits, RewardClient
from rollmesh.reward_service.conformance.grpc_transport import channels
from rollmesh.reward_service.conformance.opening import open_transport
from rollmesh.reward_service.conformance.proxy.faults import Faults
from rollmesh.reward_service.conformance.proxy.http_server import HttpFaultProxy
from rollmesh.reward_service.conformance.proxy.server import FaultProxy
from rollmesh.reward_service.conformance.transport import CallError
from tests.command import Command
from tests.reward_service.conformance.servers import Results, Server


class Counting(Server):
    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def all(self, items: Any) -> Results:
        self.asked.update(item.item_id for item in items)
        return await super().all(items)


@pytest_asyncio.fixture
async def proxy_to() -> AsyncIterator[Any]:
    """Starts proxies: `await proxy_to(address, faults)`."""
    started: list[FaultProxy | HttpFaultProxy] = []

    async def start(address: str, faults: Faults) -> FaultProxy | HttpFaultProxy:
        if address.startswith("http"):
            proxy: FaultProxy | HttpFaultProxy = HttpFaultProxy(address, faults)
        else:
            proxy = FaultProxy(channels(address.removeprefix("grpc://"), None, tls=False), faults)
        await proxy.start()
        started.append(proxy)
        return proxy

    yield start
    for proxy in started:
        await proxy.stop()


@pytest.mark.parametrize(
    ("faults", "met"),
    [
        (Faults(delay_s=0.02, reorder=True), "calls"),
        (Faults(error_rate=0.4, seed=1), "failed"),
        (Faults(lose=0.2, seed=2), "lost_results"),
        (Faults(duplicate=0.7, seed=3), "repeated"),
        (Faults(drop=0.3, seed=4), "dropped"),
        (Faults(cut_after=4, delay_s=0.02), "cuts"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_the_client_loses_nothing(
    serving: Any, proxy_to: Any, make_item: Any, faults: Faults, met: str, streams: bool
) -> None:
    """Every item has its own score, whatever its calls or streams have met."""
    server = Counting()
    server.info = reward_pb2.InfoResponse(streams=streams)
    proxy = await proxy_to(await serving(server), faults)
    limits = CallLimits(attempts=1000, timeout_s=0.2 if faults.drop else 30.0)
    client = RewardClient([f"grpc://127.0.0.1:{proxy.port}"], limits=limits)
    async with asyncio.timeout(240):
        for turn in range(8):
            items = [make_item(f"{turn}/{n}", "42" if n % 3 else "41", group_id=f"{turn}/{n // 4}") for n in range(32)]
            results = await client.score(items, timeout_s=120)
            assert [result.scored.total for result in results] == [1.0 if n % 3 else 0.0 for n in range(32)]
    await client.close()
    assert getattr(proxy.counts, met) > 0, str(proxy.counts)
    assert not faults.duplicate or max(server.asked.values()) > 1


async def test_streams_over_http_meet_them_too(serve_http: Any, proxy_to: Any, make_item: Any) -> None:
    """Spoiled answers, a seed, and a client that loses nothing; keys and other calls pass."""

    async def through(faults: Faults, streams: bool, asked: Sequence[str]) -> tuple[HttpFaultProxy, list[str]]:
        proxy = await proxy_to(target, faults)
        transport = open_transport(f"http://127.0.0.1:{proxy.port}")
        assert (await transport.info(60)).name == "rollmesh"
        items = [make_item(name) for name in asked]
        if streams:
            stream = transport.stream(60)
            for item in items:
                await stream.send(reward_pb2.ScoreStreamRequest(item=item))
            await stream.close()
            ids = [result.item_id async for result in stream.results()]
        else:
            ids = [
                result.item_id for result in (await transport.score(reward_pb2.ScoreRequest(items=items), 60)).results
            ]
        await transport.close()
        return proxy, ids

    target = await serve_http("exact_match")
    names = [str(number) for number in range(32)]
    for streams in (False, True):
        proxy, ids = await through(Faults(reorder=True, lose=0.3, seed=5), streams, names)
        assert len(ids) == 32 - proxy.counts.lost_results < 32
        assert ids != sorted(ids, key=int)
        for faults, kind in ((Faults(error_rate=1.0), "busy"), (Faults(cut_after=1), "unavailable")):
            with pytest.raises(CallError) as caught:
                await through(faults, streams, names)
            assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("faults", "met"),
    [
        (Faults(delay_s=0.02, error_rate=0.3, lose=0.1, duplicate=0.3, reorder=True, seed=1), "lost_results"),
        (Faults(drop=0.3, seed=4), "dropped"),
        (Faults(cut_after=3), "cuts"),
    ],
)
async def test_the_client_loses_nothing_over_http(
    serve_http: Any, proxy_to: Any, make_item: Any, faults: Faults, met: str
) -> None:
    proxy = await proxy_to(await serve_http("exact_match"), faults)
    limits = CallLimits(attempts=1000, timeout_s=0.2 if faults.drop else 30.0)
    client = RewardClient([f"http://127.0.0.1:{proxy.port}"], limits=limits)
    async with asyncio.timeout(240):
        for turn in range(6):
            items = [make_item(f"{turn}/{n}", "42" if n % 3 else "41") for n in range(16)]
            results = await client.score(items, timeout_s=120)
            assert [result.scored.total for result in results] == [1.0 if n % 3 else 0.0 for n in range(16)]
    await client.close()
    assert getattr(proxy.counts, met) > 0, str(proxy.counts)


async def test_streams_meet_them_too(serving: Any, proxy_to: Any, make_item: Any) -> None:
    proxy = await proxy_to(await serving(Server()), Faults(reorder=True, lose=0.3, seed=5))
    transport = open_transport(f"grpc://127.0.0.1:{proxy.port}")
    stream = transport.stream(120)
    for n in range(32):
        await stream.send(reward_pb2.ScoreStreamRequest(item=make_item(f"{n}")))
    await stream.close()
    ids = [int(result.item_id) async for result in stream.results()]
    assert len(ids) == 32 - proxy.counts.lost_results < 32
    assert ids != sorted(ids)
    await transport.close()


async def test_errors_and_keys_pass(serving: Any, proxy_to: Any, make_item: Any) -> None:
    class Refuses(Server):
        async def Score(self, request: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(context.invocation_metadata()))

    proxy = await proxy_to(await serving(Refuses()), Faults())
    transport = open_transport(f"grpc://127.0.0.1:{proxy.port}", key="secret")
    assert (await transport.info(60)).name == "good"
    assert await transport.health(60) == ""
    with pytest.raises(CallError, match="Bearer secret") as caught:
        await transport.score(reward_pb2.ScoreRequest(items=[make_item()]), 60)
    assert caught.value.kind == "exhausted"
    await transport.close()


def test_a_seed_decides() -> None:
    def fates(seed: int) -> list[tuple[bool, bool, float]]:
        faults = Faults(delay_s=1.0, error_rate=0.5, drop=0.5, seed=seed)
        calls = [faults.for_call(number) for number in range(1, 40)]
        return [(call.fails, call.drops, call.delay_s) for call in calls]

    assert fates(1) == fates(1) != fates(2)


def test_the_command_refuses_what_is_no_server(rollmesh: Command) -> None:
    for wrong in (("--to", "ftp://127.0.0.1:1"), ("--to", "grpc://127.0.0.1:1", "--listen", "here")):
        assert rollmesh("reward", "proxy", *wrong).returncode == 2
