"""A channel to several fronts: whose turn it is, who is passed over, who is learned and forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from rollmesh.mesh.addresses import addresses_of
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.rpc.failover_channel import FailoverChannel, open_mesh
from rollmesh.mesh.rpc.retries import call_with_retry
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.protos import reward_pb2, reward_pb2_grpc, weights_pb2, weights_pb2_grpc
from tests.faults.proxy import Conditions, ProxyLoop

OPEN = SecuritySection()


class Named(reward_pb2_grpc.RewardServicer, weights_pb2_grpc.WeightsServicer):
    """Says its name; may refuse, or never answer."""

    def __init__(self) -> None:
        self.address = ""
        self.refuses = False
        self.release = asyncio.Event()

    async def Info(self, request: Any, context: Any) -> reward_pb2.InfoResponse:
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return reward_pb2.InfoResponse(name=self.address)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[weights_pb2.Manifest]:
        yield weights_pb2.Manifest(run=self.address)
        await self.release.wait()


class Servers:
    """Starts and stops servers."""

    def __init__(self) -> None:
        self.running: dict[str, grpc.aio.Server] = {}

    async def start(self) -> Named:
        server, servicer = new_server(OPEN), Named()
        reward_pb2_grpc.add_RewardServicer_to_server(servicer, server)
        weights_pb2_grpc.add_WeightsServicer_to_server(servicer, server)
        servicer.address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, OPEN)}"
        await server.start()
        self.running[servicer.address] = server
        return servicer

    async def stop(self, servicer: Named) -> None:
        await self.running.pop(servicer.address).stop(0)


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    owner = Servers()
    yield owner
    for server in owner.running.values():
        await server.stop(0)


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., FailoverChannel]]:
    async with AsyncExitStack() as stack:

        def make(*addresses: str) -> FailoverChannel:
            channel = open_mesh(",".join(addresses), OPEN)
            stack.push_async_callback(channel.close)
            return channel

        yield make


async def ask(channel: FailoverChannel, times: int) -> Counter[str]:
    """Answers by server; a failed call is repeated, as clients do."""
    stub = reward_pb2_grpc.RewardStub(channel)

    async def one() -> str:
        answer = await call_with_retry(
            lambda: stub.Info(reward_pb2.InfoRequest(), timeout=180), retry_s=30, what="asking"
        )
        return str(answer.name)

    return Counter([await one() for _ in range(times)])


async def connected(channel: FailoverChannel, *addresses: str) -> None:
    """Waits until these fronts are connected."""
    async with asyncio.timeout(180):
        for address in addresses:
            while not (await ask(channel, 2 * len(channel.addresses)))[address]:
                pass


async def test_calls_and_streams_go_to_the_fronts_in_turn(
    servers: Servers, opened: Callable[..., FailoverChannel]
) -> None:
    left, right = await servers.start(), await servers.start()
    channel = opened(left.address, right.address)
    await connected(channel, left.address, right.address)
    assert await ask(channel, 10) == {left.address: 5, right.address: 5}
    stub = weights_pb2_grpc.WeightsStub(channel)
    calls = [stub.Watch(weights_pb2.WatchRequest(), timeout=240) for _ in range(4)]
    assert Counter([(await call.read()).run for call in calls]) == {left.address: 2, right.address: 2}
    for call in calls:
        call.cancel()


async def test_a_front_that_refuses_or_is_gone_is_passed_over(
    servers: Servers, opened: Callable[..., FailoverChannel]
) -> None:
    left, right = await servers.start(), await servers.start()
    channel = opened(left.address, right.address)
    await connected(channel, left.address, right.address)
    left.refuses = True
    assert await ask(channel, 10) == {right.address: 10}
    left.refuses = False
    await servers.stop(right)
    assert await ask(channel, 6) == {left.address: 6}


async def test_all_are_tried_where_none_seems_to_answer(
    servers: Servers, opened: Callable[..., FailoverChannel]
) -> None:
    left, right = await servers.start(), await servers.start()
    channel = opened(left.address, right.address)
    left.refuses = right.refuses = True
    stub = reward_pb2_grpc.RewardStub(channel)
    for _ in range(6):
        with pytest.raises(grpc.aio.AioRpcError, match="not now"):
            await stub.Info(reward_pb2.InfoRequest(), timeout=180)
    right.refuses = False
    assert (await ask(channel, 3))[right.address] == 3


async def test_fronts_are_learned_and_forgotten_with_their_last_call(
    servers: Servers, opened: Callable[..., FailoverChannel]
) -> None:
    given, later, last = await servers.start(), await servers.start(), await servers.start()
    channel = opened(given.address)
    channel.set_fronts([given.address, later.address])
    await connected(channel, later.address)
    # Both have an open stream when one of them is not listed any more.
    stub = weights_pb2_grpc.WeightsStub(channel)
    calls = [stub.Watch(weights_pb2.WatchRequest(), timeout=240) for _ in range(2)]
    names = {(await call.read()).run: call for call in calls}
    channel.set_fronts([given.address, last.address])
    await connected(channel, last.address)
    assert later.address not in await ask(channel, 6)
    later.release.set()
    assert await names[later.address].read() is grpc.aio.EOF, "what runs there is not cut off"
    channel.set_fronts([last.address])
    assert channel.addresses == [last.address, given.address], "the address given stays for bad days"
    assert await ask(channel, 4) == {last.address: 4}
    await servers.stop(last)
    assert await ask(channel, 2) == {given.address: 2}
    names[given.address].cancel()


async def test_a_client_is_connected_to_two_of_many_fronts_and_to_another_where_one_fails(
    servers: Servers, opened: Callable[..., FailoverChannel]
) -> None:
    fronts = [await servers.start() for _ in range(4)]
    given = fronts[0].address
    channels = [opened(given) for _ in range(16)]
    used: Counter[str] = Counter()
    for channel in channels:
        await ask(channel, 1)
        channel.set_fronts(front.address for front in fronts)
        async with asyncio.timeout(180):
            while len(answered := await ask(channel, 4)) != 2 or connections(channel) != set(answered):
                channel.set_fronts(front.address for front in fronts)
        used.update(answered.keys())
    assert len(used) == 4, "clients choose differently, and leave the front that they were given first"
    lost = fronts[1]
    await servers.stop(lost)
    for channel in channels:
        async with asyncio.timeout(180):
            while lost.address in (answered := await ask(channel, 4)) or len(answered) != 2:
                pass


def connections(channel: FailoverChannel) -> set[str]:
    """The fronts to which a channel is connected."""
    ready = grpc.ChannelConnectivity.READY
    return {front.address for front in channel._fronts.values() if front.channel.get_state() is ready}


async def test_a_front_behind_a_cut_link_is_noticed_by_its_silence(servers: Servers) -> None:
    near, far = await servers.start(), await servers.start()
    links = ProxyLoop()
    link = links.link(int(far.address.rpartition(":")[2]))
    async with open_mesh(f"{near.address},{link.address}", OPEN, keepalive_s=1.0) as channel:
        await connected(channel, near.address, far.address)
        stub = weights_pb2_grpc.WeightsStub(channel)
        calls = [stub.Watch(weights_pb2.WatchRequest()) for _ in range(2)]
        names = {(await call.read()).run: call for call in calls}
        link.apply("*", Conditions(mode="blackhole"))
        # A stream has no deadline: only the keepalive can tell.
        async with asyncio.timeout(180):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await names[far.address].read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await ask(channel, 4) == {near.address: 4}
        names[near.address].cancel()
    link.close()
    links.close()


@pytest.mark.parametrize("text", ["", "host", "a:1,,b:2", "a:1,b"])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not host:port"):
        addresses_of(text)


def test_addresses_are_read_with_schemes_spaces_and_repetitions() -> None:
    assert addresses_of("grpc://a:1, b:2,a:1") == ["a:1", "b:2"]
