"""Generators that relay: the learner's link carries a version a few times, and a relay's failure costs time alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from rollmesh.generators.weights import Relay, relay
from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.generators.weights.transports import Transfer
from rollmesh.generators.weights.transports.grpc_transport import GrpcTransport
from rollmesh.generators.weights.verified_transfer import VerifiedWeights, receive_verified
from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.weights import EncodingName
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.adapter import FROZEN_BASE
from rollmesh.mesh.weights.chunk_framing import CHUNK_BYTES, frame, parse
from rollmesh.protos import weights_pb2, weights_pb2_grpc
from tests.secrets_here import write_secret

SECURITY = SecuritySection()
DEADLINE_S = 240.0
BUCKETS, BUCKET_BYTES = 6, 3 << 20
VERSION = PolicyVersion(1, 0)


class Learner(WeightsService):
    """Counts what it uploads; holds buckets back when asked to."""

    def __init__(self, publisher: WeightPublisher, fanout: int) -> None:
        super().__init__(publisher, fanout)
        self.uploaded = 0
        self.asked: list[tuple[int, int]] = []
        self.failed: list[str] = []
        self.before_bucket: Callable[[int], Any] = lambda _index: asyncio.sleep(0)

    async def FetchBucket(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.asked.append((request.bucket, request.offset))
        await self.before_bucket(request.bucket)
        async for chunk in super().FetchBucket(request, context):
            self.uploaded += len(parse(chunk)[1])
            yield chunk

    async def Route(self, request: weights_pb2.RouteRequest, context: Any) -> weights_pb2.RouteResponse:
        self.failed += request.failed
        return await super().Route(request, context)


class Faulty(Relay):
    """A relay that can be told to misbehave.

    Attributes:
        fault: given the serialized chunks, what is sent in their place.
        served: bytes that went out.
    """

    fault: Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]] | None = None
    served = 0

    async def _fetch_bucket(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        chunks = super()._fetch_bucket(request, context)
        async for chunk in self.fault(chunks, context) if self.fault else chunks:
            self.served += len(parse(chunk)[1])
            yield chunk


class Generator:
    """A receiver with its relay and server."""

    def __init__(self, name: str, learner_port: int) -> None:
        self.name = name
        self.server = new_server(SECURITY)
        port = bind(self.server, "127.0.0.1", 0, SECURITY)
        self.relay = Faulty(f"127.0.0.1:{port}")
        self.relay.add_to(self.server)
        address = f"127.0.0.1:{learner_port}"
        self.connection = LearnerConnection("learner-1", address, partial(open_channel, address, SECURITY))

    async def receive(self, bucket_set: BucketSet, timeout_s: float = DEADLINE_S, streams: int = 1) -> VerifiedWeights:
        fetch = Transfer(
            bucket_set,
            self.connection,
            timeout_s,
            superseded=lambda: False,
            member_id=self.name,
            relay_address=self.relay.address,
        )
        holding = self.relay.begin(bucket_set)
        verified = await asyncio.wait_for(
            receive_verified(GrpcTransport(streams=streams), fetch, holding.add_verified), DEADLINE_S
        )
        self.relay.finish(holding)
        return verified

    async def holds(self, count: int) -> None:
        """Waits until so many buckets are there."""
        async with asyncio.timeout(DEADLINE_S):
            while sum(len(holding._parts) for holding in self.relay._kept) < count:
                await asyncio.sleep(0.01)


class World:
    """A learner with one version, and generators."""

    def __init__(self, folder: Path, fanout: int, encoding: EncodingName) -> None:
        self.publisher = WeightPublisher(
            "run", {}, PublishRules(bucket_bytes=BUCKET_BYTES, encoding=encoding), directory=folder
        )
        self.learner = Learner(self.publisher, fanout)
        self.server = new_server(SECURITY)
        weights_pb2_grpc.add_WeightsServicer_to_server(self.learner, self.server)
        self.port = bind(self.server, "127.0.0.1", 0, SECURITY)
        tensors = {f"{i}": torch.full((BUCKET_BYTES // 4,), float(i)) for i in range(BUCKETS)}
        self.bucket_set = BucketSet.full(self.publisher.publish(VERSION, tensors.items(), "float32"))
        assert len(self.bucket_set.buckets) == BUCKETS
        self.generators: list[Generator] = []

    async def generator(self, name: str) -> Generator:
        made = Generator(name, self.port)
        self.generators.append(made)
        await made.server.start()
        return made


@asynccontextmanager
async def world_of(folder: Path, fanout: int, encoding: EncodingName = "full") -> AsyncIterator[World]:
    world = World(folder, fanout, encoding)
    await world.server.start()
    try:
        yield world
    finally:
        for generator in world.generators:
            await generator.connection.close()
            await generator.server.stop(0)
            generator.relay.close()
        await world.server.stop(0)
        world.publisher.close()


async def test_the_learner_uploads_twice_whatever_the_number_of_receivers(tmp_path: Path) -> None:
    async with world_of(tmp_path, fanout=2) as world:
        generators = [await world.generator(f"g{i}") for i in range(8)]
        received = await asyncio.gather(*(generator.receive(world.bucket_set, streams=2) for generator in generators))
        size = sum(bucket.nbytes for bucket in world.bucket_set.buckets)
        assert world.learner.uploaded == 2 * size
        assert max(generator.relay.served for generator in generators) == 2 * size
        assert sum(not verified.source for verified in received) == 2


async def test_a_bucket_goes_on_before_the_next_has_come(tmp_path: Path) -> None:
    async with world_of(tmp_path, fanout=1) as world:
        first, second = await world.generator("first"), await world.generator("second")
        reached, release = asyncio.Event(), asyncio.Event()

        async def hold_the_last(index: int) -> None:
            if index == BUCKETS - 1:
                reached.set()
                await release.wait()

        world.learner.before_bucket = hold_the_last
        one = asyncio.create_task(first.receive(world.bucket_set))
        await asyncio.wait_for(reached.wait(), DEADLINE_S)
        two = asyncio.create_task(second.receive(world.bucket_set))
        await second.holds(BUCKETS - 1)
        assert not one.done()
        release.set()
        await asyncio.gather(one, two)
        assert [index for index, _ in world.learner.asked] == list(range(BUCKETS))


async def cut_after_two_chunks(chunks: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        if parse(chunk)[0] >= 2 * CHUNK_BYTES:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        yield chunk


async def flip_a_bit(chunks: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        offset, data = parse(chunk)
        yield frame(offset, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:])))


async def say_nothing(chunks: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    async for chunk in chunks:
        yield chunk


async def send_too_much(_chunks: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    yield frame(0, memoryview(bytes(BUCKET_BYTES + 1)))


@pytest.mark.parametrize(
    ("fault", "goes_on_at"),
    [
        (cut_after_two_chunks, (0, 2 * CHUNK_BYTES)),
        (flip_a_bit, (0, 0)),
        (say_nothing, (0, 0)),
        (send_too_much, (0, 0)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_relay_that_fails_is_left_at_the_byte_where_it_stopped(
    tmp_path: Path, fault: Any, goes_on_at: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with world_of(tmp_path, fanout=1) as world:
        parent, child = await world.generator("parent"), await world.generator("child")
        await parent.receive(world.bucket_set)
        parent.relay.fault = fault
        world.learner.asked.clear()
        verified = await child.receive(world.bucket_set, timeout_s=3.0)
        assert world.learner.asked[0] == goes_on_at
        assert world.learner.failed == [parent.relay.address]
        assert f"version {VERSION} does not come from {parent.relay.address}: " in caplog.text
        assert verified.source == ""
        # The next one is given the child, not the parent.
        other = await world.generator("other")
        assert (await other.receive(world.bucket_set)).source == child.relay.address


async def test_a_relay_that_dies_halfway_is_replaced(tmp_path: Path) -> None:
    async with world_of(tmp_path, fanout=1) as world:
        parent, child, grandchild = [await world.generator(name) for name in ("parent", "child", "grandchild")]
        reached, release = asyncio.Event(), asyncio.Event()

        async def hold_the_third(index: int) -> None:
            if index == 2:
                reached.set()
                await release.wait()

        world.learner.before_bucket = hold_the_third
        above = asyncio.create_task(parent.receive(world.bucket_set))
        await asyncio.wait_for(reached.wait(), DEADLINE_S)
        below = []
        for generator in (child, grandchild):
            below.append(asyncio.create_task(generator.receive(world.bucket_set)))
            await generator.holds(2)
        world.learner.asked.clear()
        above.cancel()
        await parent.server.stop(0)
        release.set()
        one, two = await asyncio.gather(*below)
        assert (one.source, two.source) == ("", child.relay.address)
        assert world.learner.failed == [parent.relay.address]
        # Nothing was fetched twice.
        assert [index for index, _ in world.learner.asked] == [2, 3, 4, 5]


async def test_a_receiver_that_dies_disturbs_no_one(tmp_path: Path) -> None:
    async with world_of(tmp_path, fanout=1) as world:
        parent, child, late = [await world.generator(name) for name in ("parent", "child", "late")]
        await parent.receive(world.bucket_set)
        dying = asyncio.create_task(child.receive(world.bucket_set))
        await child.holds(1)
        dying.cancel()
        await child.server.stop(0)
        # It is sent to the one that died, and continues from there.
        assert (await late.receive(world.bucket_set)).source == ""
        assert world.learner.failed == [child.relay.address]


async def test_links_of_deltas_are_relayed(tmp_path: Path) -> None:
    async with world_of(tmp_path, fanout=1, encoding="delta") as world:
        generators = [await world.generator(name) for name in ("first", "second")]
        for generator in generators:
            await generator.receive(world.bucket_set)
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        world.publisher.subscribe(lambda: loop.call_soon_threadsafe(told.set))
        changed = {f"{i}": torch.full((BUCKET_BYTES // 4,), i + 1e-3) for i in range(BUCKETS)}
        manifest = world.publisher.publish(PolicyVersion(1, 1), changed.items(), "float32")
        async with asyncio.timeout(DEADLINE_S):
            while not (linked := world.publisher.with_links(manifest)).deltas:
                await told.wait()
                told.clear()
        link = BucketSet.of_delta(linked.deltas[-1])
        assert link.nbytes < world.bucket_set.nbytes
        assert [(await generator.receive(link)).source for generator in generators] == [
            "",
            generators[0].relay.address,
        ]


async def test_what_a_relay_does_not_hold_comes_from_the_learner(tmp_path: Path) -> None:
    async with world_of(tmp_path, fanout=1) as world:
        parent, child = await world.generator("parent"), await world.generator("child")
        await parent.receive(world.bucket_set)
        parent.relay.close()
        assert (await child.receive(world.bucket_set)).source == ""
        with pytest.raises(WeightsError, match="not held here"):
            parent.relay.find(VERSION, None)


async def test_a_waiting_relay_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HEARTBEAT_S", 0.01)
    async with world_of(tmp_path, fanout=1) as world:
        holding = Relay("here:1").begin(world.bucket_set)
        chunks = holding.chunks(0, 5)
        assert weights_pb2.BucketChunk.FromString(await anext(chunks)) == weights_pb2.BucketChunk(offset=5)
        holding.add_verified(memoryview(bytes(range(100)) * (world.bucket_set.nbytes // 100 + 1)), 0)
        async with asyncio.timeout(DEADLINE_S):
            while not (found := weights_pb2.BucketChunk.FromString(await anext(chunks))).data:
                pass
        assert (found.offset, found.data[0]) == (5, 5)


async def test_newer_versions_take_the_place_of_older_ones(tmp_path: Path) -> None:
    async with world_of(tmp_path, fanout=1) as world:
        buckets = world.bucket_set.buckets
        held = Relay("here:1")

        def begin(version: int, base: int | None = None) -> relay.RelayedBuckets:
            holding = held.begin(
                BucketSet(PolicyVersion(1, version), PolicyVersion(1, base) if base else None, buckets)
            )
            for index in range(BUCKETS):
                holding.add_verified(memoryview(bytes(world.bucket_set.nbytes)), index)
            return holding

        first = begin(1)
        held.finish(first)
        second = begin(2)
        # The older one is served until the newer one is whole.
        assert held.find(PolicyVersion(1, 1), None) is first
        held.finish(second)
        with pytest.raises(WeightsError):
            held.find(PolicyVersion(1, 1), None)
        # Links stay for receivers that are late in the chain, but not for ever.
        links = [begin(version, version - 1) for version in range(3, 20)]
        for link in links:
            held.finish(link)
        assert held.find(PolicyVersion(1, 2), None) is second
        assert held.find(PolicyVersion(1, 18), PolicyVersion(1, 17)) is links[-2]
        with pytest.raises(WeightsError):
            held.find(PolicyVersion(1, 3), PolicyVersion(1, 2))


async def test_the_base_of_adapters_outlives_them_while_it_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_IDLE_S", 0.01)
    async with world_of(tmp_path, fanout=1) as world:
        held = Relay("here:1")

        def receive(policy: PolicyVersion) -> relay.RelayedBuckets:
            holding = held.begin(BucketSet(policy, None, world.bucket_set.buckets))
            for index in range(BUCKETS):
                holding.add_verified(memoryview(bytes(world.bucket_set.nbytes)), index)
            holding.requested = True
            held.finish(holding)
            return holding

        base = receive(FROZEN_BASE)
        for version in range(3):
            newest = receive(PolicyVersion(1, version))
        assert held.find(FROZEN_BASE, None) is base
        assert held.find(PolicyVersion(1, 2), None) is newest
        with pytest.raises(WeightsError):
            held.find(PolicyVersion(1, 1), None)
        async with asyncio.timeout(DEADLINE_S):
            while base in held._kept:
                await asyncio.sleep(0.01)


async def test_a_version_that_is_being_fetched_outlives_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(tmp_path, fanout=1) as world:
        parent, child = await world.generator("parent"), await world.generator("child")
        await parent.receive(world.bucket_set)
        release = asyncio.Event()

        async def slow(chunks: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            if child.relay._kept[0]._parts:
                await release.wait()
            async for chunk in chunks:
                yield chunk

        def newer(version: int) -> None:
            """The parent has another version, as soon as it is announced."""
            holding = parent.relay.begin(BucketSet(PolicyVersion(1, version), None, world.bucket_set.buckets))
            for index in range(BUCKETS):
                holding.add_verified(memoryview(bytes(world.bucket_set.nbytes)), index)
            parent.relay.finish(holding)

        parent.relay.fault = slow
        fetching = asyncio.create_task(child.receive(world.bucket_set))
        await child.holds(1)
        for version in (1, 2):
            newer(version)
        assert [held.bucket_set.policy.version for held in parent.relay._kept] == [0, 2]
        release.set()
        assert (await fetching).source == parent.relay.address
        monkeypatch.setattr("rollmesh.mesh.weights.active_readers.GRACE_S", 0.0)
        newer(3)
        assert [held.bucket_set.policy.version for held in parent.relay._kept] == [3]


async def test_what_no_one_asks_for_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_IDLE_S", 0.0)
    async with world_of(tmp_path, fanout=1) as world:
        parent = await world.generator("parent")
        await parent.receive(world.bucket_set)
        async with asyncio.timeout(DEADLINE_S):
            while parent.relay._kept:
                await asyncio.sleep(0)


async def test_only_buckets_are_served_and_only_with_the_token(tmp_path: Path) -> None:
    guarded = SecuritySection(token_file=write_secret(tmp_path / "token"))
    generator = Identity(Role.GENERATOR, "generator-g")
    server = new_server(guarded)
    port = bind(server, "127.0.0.1", 0, guarded)
    Relay(f"127.0.0.1:{port}").add_to(server)
    await server.start()
    request = weights_pb2.FetchBucketRequest(policy=VERSION.to_proto())
    try:
        for security, code in ((SECURITY, grpc.StatusCode.UNAUTHENTICATED), (guarded, grpc.StatusCode.NOT_FOUND)):
            async with open_channel(f"127.0.0.1:{port}", security) as channel:
                stub = weights_pb2_grpc.WeightsStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.FetchBucket(request, timeout=DEADLINE_S).read()
                assert failed.value.code() is code
        async with open_channel(f"127.0.0.1:{port}", guarded, generator) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await weights_pb2_grpc.WeightsStub(channel).Route(weights_pb2.RouteRequest(), timeout=DEADLINE_S)
            assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)
