"""The grpc transport on links that are slow, cut or dead."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.generators.weights.transports import Transfer
from rollmesh.generators.weights.transports.grpc_transport import GrpcTransport
from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.chunk_framing import CHUNK_BYTES, frame, parse
from rollmesh.protos import weights_pb2, weights_pb2_grpc
from tests.faults.proxy import Conditions, Link, ProxyLoop
from tests.generators.weights.transports.world import Arrivals

SECURITY = SecuritySection()
DEADLINE_S = 240.0


class Service(WeightsService):
    """Notes what is asked for; answers so many calls together when asked to."""

    def __init__(self, publisher: WeightPublisher) -> None:
        super().__init__(publisher)
        self.asked: list[tuple[int, int]] = []
        self.together: asyncio.Barrier | None = None

    async def FetchBucket(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.asked.append((request.bucket, request.offset))
        if self.together is not None:
            await self.together.wait()
        async for chunk in super().FetchBucket(request, context):
            yield chunk


@pytest.fixture
def proxies() -> Iterator[ProxyLoop]:
    loop = ProxyLoop()
    yield loop
    loop.close()


@asynccontextmanager
async def behind_a_link(folder: Path, proxies: ProxyLoop) -> AsyncIterator[tuple[Service, Link, LearnerConnection]]:
    publisher = WeightPublisher("run", {}, PublishRules(bucket_bytes=4 << 20), directory=folder)
    service = Service(publisher)
    server = new_server(SECURITY)
    weights_pb2_grpc.add_WeightsServicer_to_server(service, server)
    port = bind(server, "127.0.0.1", 0, SECURITY)
    await server.start()
    link = await asyncio.to_thread(proxies.link, port)
    connection = LearnerConnection("learner-1", link.address, partial(open_channel, link.address, SECURITY))
    tensors = {f"{i}": torch.full((1 << 20,), float(i)) for i in range(2)}
    publisher.publish(PolicyVersion(1, 0), tensors.items(), "float32")
    try:
        yield service, link, connection
    finally:
        await connection.close()
        await asyncio.to_thread(link.close)
        await server.stop(0)
        publisher.close()


def fetch_of(service: Service, connection: LearnerConnection, timeout_s: float) -> Transfer:
    manifest = service._publisher.newest
    assert manifest is not None
    bucket_set = BucketSet.full(manifest)
    return Transfer(bucket_set, connection, timeout_s, superseded=lambda: False, member_id="gen-1")


async def test_buckets_come_side_by_side(tmp_path: Path, proxies: ProxyLoop) -> None:
    async with behind_a_link(tmp_path, proxies) as (service, _, connection):
        service.together = asyncio.Barrier(2)
        fetch = fetch_of(service, connection, 10.0)
        arrivals = Arrivals(fetch.bucket_set)
        arrivals.check(await asyncio.wait_for(GrpcTransport(streams=2).receive(fetch, arrivals), DEADLINE_S))
        assert sorted(service.asked) == [(0, 0), (1, 0)]


async def test_a_slow_link_is_borne_as_long_as_it_brings_something(tmp_path: Path, proxies: ProxyLoop) -> None:
    async with behind_a_link(tmp_path, proxies) as (service, link, connection):
        link.apply("*", Conditions(bytes_per_s=2e6))
        fetch = fetch_of(service, connection, timeout_s=2.0)
        began = asyncio.get_running_loop().time()
        arrivals = Arrivals(fetch.bucket_set)
        arrivals.check(await asyncio.wait_for(GrpcTransport(streams=1).receive(fetch, arrivals), DEADLINE_S))
        assert asyncio.get_running_loop().time() - began > fetch.timeout_s
        assert service.asked == [(0, 0), (1, 0)]


async def test_a_cut_link_goes_on_at_the_byte_where_it_stopped(tmp_path: Path, proxies: ProxyLoop) -> None:
    async with behind_a_link(tmp_path, proxies) as (service, link, connection):
        link.apply("*", Conditions(bytes_per_s=8e6))
        fetch = fetch_of(service, connection, timeout_s=10.0)
        arrivals = Arrivals(fetch.bucket_set)
        transfer = asyncio.create_task(GrpcTransport(streams=1).receive(fetch, arrivals))
        await asyncio.wait_for(arrivals.some.wait(), DEADLINE_S)
        await asyncio.to_thread(link.apply, "*", Conditions("cut"))
        await asyncio.to_thread(link.apply, "*", Conditions())
        arrivals.check(await asyncio.wait_for(transfer, DEADLINE_S))
        assert service.asked[:2] == [(0, 0), (1, 0)]
        assert all(bucket == 1 for bucket, _ in service.asked[2:])


async def test_a_dead_link_fails_in_time(tmp_path: Path, proxies: ProxyLoop) -> None:
    async with behind_a_link(tmp_path, proxies) as (service, link, connection):
        link.apply("*", Conditions(bytes_per_s=8e6))
        fetch = fetch_of(service, connection, timeout_s=2.0)
        arrivals = Arrivals(fetch.bucket_set)
        transfer = asyncio.create_task(GrpcTransport(streams=1).receive(fetch, arrivals))
        await asyncio.wait_for(arrivals.some.wait(), DEADLINE_S)
        await asyncio.to_thread(link.apply, "*", Conditions("blackhole"))
        with pytest.raises(WeightsError, match=r"bucket 1 of version 1:0: no byte for .* nothing came"):
            await asyncio.wait_for(transfer, DEADLINE_S)


def test_chunks_are_protobuf_messages() -> None:
    for offset, length in itertools.product((0, 1, 127, 128, 1 << 40), (1, 127, 128, 768, CHUNK_BYTES)):
        data = memoryview(bytes(range(256)) * -(-length // 256))[:length]
        message = weights_pb2.BucketChunk(offset=offset, data=bytes(data))
        framed = frame(offset, data)
        assert weights_pb2.BucketChunk.FromString(framed) == message
        assert parse(message.SerializeToString()) == parse(framed) == (offset, data)
        assert parse(framed)[1].obj is framed, "its bytes are not copied"
    assert parse(b"") == (0, memoryview(b""))
    ends = weights_pb2.BucketChunk(data=b"x"), weights_pb2.BucketChunk(offset=7)
    assert parse(b"".join(end.SerializeToString() for end in ends)) == (7, memoryview(b"x"))
    endless = b"\x08" + b"\x80" * 10 + b"\x01\x12\x00"
    for broken in (b"\x12\x05abc", b"\x08", b"\x08\xff\xff", b"\x12", endless):
        with pytest.raises(PayloadError):
            parse(broken)
