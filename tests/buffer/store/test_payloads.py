"""Large payloads: uploaded in pieces, counted by the write, fetched in parts, removed with their group."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.buffer.client.client import PendingWrite
from rollmesh.buffer.client.write_stream import WriteResult
from rollmesh.buffer.protocol.limits import INLINE_BYTES, MAX_PIECES, MAX_WHOLE_BYTES, PIECE_BYTES
from rollmesh.buffer.server.process import BufferFront
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.payloads import PayloadRef, Payloads, digest_of, name_of
from rollmesh.mesh.errors import DataError, PayloadError, RollmeshError
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.trajectory.payload_codec import Trajectory, encode, head_of
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Learner, Mesh, head_of_write, key_of
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)
# A little more than two pieces.
LARGE = 2 * PIECE_BYTES // 8 + 1000


def large_write(grant: pb.GroupGrant, member: int, tokens: int = LARGE) -> PendingWrite:
    """A member of many tokens, different from every other member's."""
    ids = np.arange(member, tokens + member, dtype=np.int32)
    log_probs = -np.arange(tokens, dtype=np.float32) / 7
    payload = encode(Trajectory(ids, log_probs, np.ones(tokens, np.uint8), VersionRuns(((tokens, V0),))))
    meta = trajectory.MemberMeta(
        member=member, outcome=trajectory.OUTCOME_SCORED, reward=1.0, prompt_tokens=4, response_tokens=tokens,
        oldest=V0.to_proto(), newest=V0.to_proto(),
    )  # fmt: skip
    return PendingWrite(head_of_write(grant, meta), payload)


def named(write: PendingWrite, pieces: int | None = None) -> PendingWrite:
    """The write that names uploaded pieces."""
    head = pb.MemberWrite()
    head.CopyFrom(write.head)
    head.pieces = -(-len(write.payload) // PIECE_BYTES) if pieces is None else pieces
    head.uploaded_bytes = len(write.payload)
    head.uploaded_digest = digest_of(write.payload)
    return PendingWrite(head, head_of(write.payload))


def requests_of(write: PendingWrite) -> list[pb.UploadRequest]:
    payload = write.payload
    return [
        pb.UploadRequest(
            table="train", group_id=write.head.group_id, lease_id=write.head.lease_id, attempt=write.head.attempt,
            member=write.head.meta.member, piece=piece, data=payload[start : start + PIECE_BYTES],
            digest=digest_of(payload),
        )
        for piece, start in enumerate(range(0, len(payload), PIECE_BYTES))
    ]  # fmt: skip


async def upload(actor: Generator | Learner, requests: list[pb.UploadRequest]) -> pb.UploadResponse:
    """One call, as it is; failures are those of gRPC."""

    async def iterate() -> Any:
        for request in requests:
            yield request

    response: pb.UploadResponse = await actor.client._stub.Upload(iterate(), timeout=TIMEOUT_S)
    return response


async def begin(mesh: Mesh, groups: int = 1) -> tuple[BufferFront, Learner, Generator, list[pb.GroupGrant]]:
    """A front with its message limit at gRPC's default, and groups granted."""
    front, learner, generator, _, grants = await mesh.granted(groups, network={"max_message_mb": 4})
    return front, learner, generator, grants


def keys_of(front: BufferFront, group_id: str) -> str:
    return f"rollmesh:{front.run_name}:train:v:{group_id}:*"


async def test_a_large_member_is_written_in_pieces_and_comes_back_byte_for_byte(mesh: Mesh) -> None:
    front, learner, generator, (grant,) = await begin(mesh)
    writer = generator.writer()
    writes = [large_write(grant, 0), large_write(grant, 1, tokens=100)]
    results = await writer.write(writes)
    assert [r.status for r in results] == [pb.WRITE_STATUS_STORED] * 2
    redis = front.access.client
    keys = sorted(await redis.keys(keys_of(front, grant.group_id)))
    large, small = (key_of(front, write) for write in writes)
    assert [key.decode() for key in keys] == [f"{large}:{i}" for i in range(3)] + [small]
    assert [await redis.ttl(key) for key in keys] == [-1] * 4, "nothing that may be used expires"
    assert (await learner.client.describe("train")).bytes == sum(len(w.payload) for w in writes)

    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert list(group.pieces) == [3, 0]
    assert learner.payloads[group.group_id] == [b"", writes[1].payload]
    refs = [pb.MemberRef(group_id=grant.group_id, member=member) for member in (1, 0, 1)]
    fetched = [payload async for payload in learner.client.fetch("train", refs)]
    assert fetched == [writes[1].payload, writes[0].payload, writes[1].payload]

    assert (await learner.train([group], 0)).claimed
    await learner.client.commit("train", 1, 1)
    async with asyncio.timeout(TIMEOUT_S):
        while await redis.keys(f"rollmesh:{front.run_name}:*"):
            await asyncio.sleep(0.02)
    assert (await balanced(learner)).trained == 1


async def test_a_group_with_many_bytes_is_leased_without_payloads(mesh: Mesh) -> None:
    _, learner, generator, (small, large) = await begin(mesh, groups=2)
    writer = generator.writer()
    tokens = PIECE_BYTES // 8 - 100
    await writer.write([large_write(small, member, tokens) for member in range(2)])
    await writer.write([large_write(large, member, INLINE_BYTES // 16) for member in range(2)])
    groups = await learner.batch(learner.sampler(), 2, 0)
    assert [len(p) > tokens for p in learner.payloads[groups[0].group_id]] == [True, True]
    assert not groups[0].pieces
    assert (learner.payloads[groups[1].group_id], list(groups[1].pieces)) == ([b"", b""], [3, 3])


async def test_a_group_of_many_whole_payloads_is_fetched(mesh: Mesh) -> None:
    front = await mesh.front(network={"max_message_mb": 4}, rollout={"n": 6})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    task = trajectory.PromptTask(task_id="t", ordinal=1, prompt_ids=b"\0" * 16, n=6)
    await learner.client.seed("train", learner.incarnation, [task])
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    writes = [large_write(grant, member, PIECE_BYTES // 8 - 100) for member in range(6)]
    await generator.writer().write(writes)
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert (set(learner.payloads[group.group_id]), list(group.pieces)) == ({b""}, [1] * 6)
    refs = [pb.MemberRef(group_id=grant.group_id, member=member) for member in range(6)]
    assert [p async for p in learner.client.fetch("train", refs)] == [w.payload for w in writes]


async def test_what_was_not_uploaded_is_refused_by_name(mesh: Mesh) -> None:
    front, _, generator, (grant,) = await begin(mesh)
    writer = generator.writer()
    write = large_write(grant, 0)
    requests = requests_of(write)

    async def refused(changed: PendingWrite) -> str:
        (result,) = await writer.write([changed])
        assert result.status == pb.WRITE_STATUS_REJECTED
        return result.field

    assert await refused(named(write)) == "pieces"
    assert await upload(generator, requests[:2]) == pb.UploadResponse(pieces=2, bytes=2 * PIECE_BYTES)
    assert await refused(named(write)) == "pieces"
    await upload(generator, requests[2:])
    cut = large_write(grant, 1)
    short = requests_of(cut)
    short[2].data = short[2].data[:-1]
    for request in short:
        request.digest = "0" * 16
    await upload(generator, short)
    broken = named(cut)
    broken.head.uploaded_digest = "0" * 16
    assert await refused(broken) == "uploaded_bytes"
    broken.head.uploaded_digest = "no digest"
    assert await refused(broken) == "uploaded_digest"
    await upload(generator, requests_of(cut))
    with pytest.raises(grpc.aio.AioRpcError, match="is already stored with other bytes"):
        await upload(generator, [*requests_of(cut)[:2], _with_data(requests_of(cut)[2], b"other")])
    other = named(large_write(grant, 0))
    other.payload = other.payload.replace(b"mask", b"MASK")
    assert await refused(other) == "mask"
    other = named(write)
    other.payload = head_of(large_write(grant, 0, LARGE - 1).payload)
    other.head.meta.response_tokens = LARGE - 1
    other.head.uploaded_bytes -= 8
    assert await refused(other) == "uploaded_bytes"
    changed = VersionRuns(((1, V0), (LARGE - 1, V0)))
    ids = np.zeros(LARGE, np.int32)
    other = named(write)
    other.payload = head_of(encode(Trajectory(ids, np.zeros(LARGE, np.float32), np.ones(LARGE, np.uint8), changed)))
    other.head.uploaded_bytes += len(other.payload) - len(head_of(write.payload))
    assert await refused(other) == "uploaded_bytes"
    assert await refused(named(write, pieces=1)) == "pieces"
    assert await refused(named(write, pieces=MAX_PIECES + 1)) == "pieces"
    response = await _written(generator, large_write(grant, 0, MAX_WHOLE_BYTES // 8 + 1))
    assert (response.status, response.field) == (pb.WRITE_STATUS_REJECTED, "payload")
    results = await writer.write([named(write), named(cut)])
    assert [r.status for r in results] == [pb.WRITE_STATUS_STORED] * 2
    pieces = sorted(await front.access.client.keys(f"{keys_of(front, grant.group_id)[:-1]}0:*"))
    assert await front.access.client.mget(pieces) == [request.data for request in requests]


def _with_data(request: pb.UploadRequest, data: bytes) -> pb.UploadRequest:
    request.data = data
    return request


async def _written(generator: Generator, write: PendingWrite) -> WriteResult:
    """Writes without a `WriteStream`, which would upload what is large; the payload is where protobuf puts it."""
    call = generator.client._stub.Write(timeout=TIMEOUT_S)
    write.head.payload_bytes = len(write.payload)
    request = pb.WriteRequest(
        table="train", member_id=generator.agent.member_id, generation=generator.agent.generation,
        writes=[write.head], payloads=write.payload,
    )  # fmt: skip
    await call.write(request)
    response = await call.read()
    call.cancel()
    (said,) = response.results
    return WriteResult(response.statuses[0], said.sealed, said.field, said.message)


async def test_lengths_that_do_not_add_up_end_the_stream_and_store_nothing(mesh: Mesh) -> None:
    front, _, generator, (grant,) = await begin(mesh)
    call = generator.client._stub.Write(timeout=TIMEOUT_S)
    good, short = large_write(grant, 0, 10), large_write(grant, 1, 10)
    good.head.payload_bytes, short.head.payload_bytes = len(good.payload), len(short.payload) - 1
    request = pb.WriteRequest(table="train", writes=[good.head, short.head], payloads=good.payload + short.payload)
    await call.write(request)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call.read()
    error = to_rollmesh_error(failure.value, "writing")
    assert isinstance(error, PayloadError)
    assert error.field == "payload_bytes"
    assert not await front.access.client.keys(keys_of(front, grant.group_id))


async def test_the_head_must_be_what_the_pieces_begin_with(mesh: Mesh) -> None:
    _, _, generator, (grant,) = await begin(mesh)
    write = large_write(grant, 0)
    await upload(generator, requests_of(write))
    other = named(write)
    # Other versions, in a head of the same length.
    other.payload = other.payload.replace(struct.pack("<III", LARGE, 1, 0), struct.pack("<III", LARGE, 1, 7))
    assert other.payload != head_of(write.payload)
    other.head.meta.oldest.version = other.head.meta.newest.version = 7
    (result,) = await generator.writer().write([other])
    assert (result.status, result.field) == (pb.WRITE_STATUS_REJECTED, "payload")


async def test_uploads_may_be_repeated_at_any_time(mesh: Mesh) -> None:
    front, learner, generator, (grant,) = await begin(mesh)
    writer = generator.writer()
    write = large_write(grant, 0)
    await upload(generator, requests_of(write))
    redis = front.access.client
    key = f"{key_of(front, write)}:1"
    assert (await upload(generator, requests_of(write))).pieces == 3
    assert (await writer.write([write]))[0].status == pb.WRITE_STATUS_STORED
    assert (await upload(generator, requests_of(write))).pieces == 0, "what is stored needs no upload"
    assert (await writer.write([write]))[0].status == pb.WRITE_STATUS_DUPLICATE
    await writer.write([large_write(grant, 1, 10)])
    # A front that was slower than the seal: what is in use stays what it is, whatever comes.
    late = Payloads(front.access, Keys(front.run_name))
    stored = await redis.get(key)
    for data in (stored, b"something else"):
        await late.put_piece("train", grant.group_id, PayloadRef(name_of(0, 1, digest_of(write.payload))), 1, data)
        assert (await redis.get(key), await redis.ttl(key)) == (stored, -1)
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert (await learner.train([group], 0)).claimed


async def test_a_late_holder_leaves_nothing(mesh: Mesh) -> None:
    front, learner, generator, (grant,) = await begin(mesh)
    write = large_write(grant, 0)
    await upload(generator, requests_of(write))
    await generator.client.release(
        "train", generator.agent.member_id, generator.agent.generation,
        [pb.LeaseRef(group_id=grant.group_id, lease_id=grant.lease_id)],
    )  # fmt: skip
    successor = await mesh.generator(front)
    admission = successor.admission()
    admission.update(1, V0)
    (again,) = await successor.grants(admission, 1)
    assert again.attempt == 2
    (late,) = await generator.writer().write([write])
    assert late.status == pb.WRITE_STATUS_SUPERSEDED
    assert not await front.access.client.keys(keys_of(front, grant.group_id))
    writes = [large_write(again, member) for member in range(2)]
    await successor.writer().write(writes)
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    refs = [pb.MemberRef(group_id=grant.group_id, member=member) for member in range(2)]
    assert [p async for p in learner.client.fetch("train", refs)] == [w.payload for w in writes]
    await learner.train([group], 0)
    (ended,) = await generator.writer().write([write])
    assert ended.status == pb.WRITE_STATUS_SUPERSEDED


async def test_a_lost_piece_ends_the_group(mesh: Mesh) -> None:
    front, learner, generator, (first, second) = await begin(mesh, groups=2)
    writes = [large_write(g, m) for g in (first, second) for m in range(2)]
    await generator.writer().write(writes)
    await front.access.client.delete(f"{key_of(front, writes[1])}:2")
    sampler = learner.sampler()
    sampler.request(2, 0)
    (group,) = await learner.collect(sampler, 1)
    assert group.group_id == second.group_id
    counts = await balanced(learner)
    assert (counts.failed, counts.reasons["failed/payload_lost"]) == (1, 1)
    with pytest.raises(DataError, match="no payload"):
        [p async for p in learner.client.fetch("train", [pb.MemberRef(group_id=first.group_id, member=0)])]


async def test_a_front_that_goes_away_in_the_middle_costs_nothing(mesh: Mesh) -> None:
    front, learner, generator, (grant,) = await begin(mesh)
    writer = generator.writer()
    writes = [large_write(grant, 0, 3_000_000), large_write(grant, 1, 10)]
    writing = asyncio.create_task(writer.write(writes))
    redis, port, config = front.access.client, int(front.address.rpartition(":")[2]), front._config
    async with asyncio.timeout(TIMEOUT_S):
        while not await redis.keys(f"{keys_of(front, grant.group_id)[:-1]}0:1:*"):
            await asyncio.sleep(0)
    await mesh.stop_front(front)
    await mesh.front(config, port=port)
    async with asyncio.timeout(TIMEOUT_S):
        assert [r.status for r in await writing] == [pb.WRITE_STATUS_STORED] * 2
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    refs = [pb.MemberRef(group_id=group.group_id, member=member) for member in range(2)]
    assert [p async for p in learner.client.fetch("train", refs)] == [w.payload for w in writes]


async def test_what_cannot_be_sent_is_refused_by_name(mesh: Mesh) -> None:
    front, _, generator, (grant,) = await begin(mesh)
    writer = generator.writer()
    draft, broken = large_write(grant, 0), large_write(grant, 1)
    draft.head.draft = True
    broken.payload = b"XXXX" + broken.payload[4:]
    results = await writer.write([draft, broken, large_write(grant, 0, 10)])
    assert [(r.status, r.field) for r in results] == [
        (pb.WRITE_STATUS_REJECTED, "payload"),
        (pb.WRITE_STATUS_REJECTED, "payload.magic"),
        (pb.WRITE_STATUS_STORED, ""),
    ]
    assert len(await front.access.client.keys(keys_of(front, grant.group_id))) == 1
    huge = large_write(grant, 1, 10)
    huge.head.meta.generator = "x" * (5 << 20)
    with pytest.raises(RollmeshError, match="larger than max"):
        await writer.write([huge])


async def test_a_fetch_goes_on_at_another_front(mesh: Mesh) -> None:
    front, learner, generator, grants = await begin(mesh, groups=2)
    writes = [large_write(grant, member, 1_000_000) for grant in grants for member in range(2)]
    await generator.writer().write(writes)
    refs = [pb.MemberRef(group_id=write.head.group_id, member=write.head.meta.member) for write in writes]
    fetching = learner.client.fetch("train", refs)
    assert await anext(fetching) == writes[0].payload
    port, config = int(front.address.rpartition(":")[2]), front._config
    await mesh.stop_front(front)
    await mesh.front(config, port=port)
    async with asyncio.timeout(TIMEOUT_S):
        assert [payload async for payload in fetching] == [write.payload for write in writes[1:]]


async def test_malformed_uploads_are_refused_by_name(mesh: Mesh) -> None:
    front, _, generator, (grant,) = await begin(mesh)
    good = requests_of(large_write(grant, 0))

    async def refused(**changes: Any) -> str:
        bad = pb.UploadRequest()
        bad.CopyFrom(good[1])
        for name, value in changes.items():
            setattr(bad, name, value)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await upload(generator, [good[0], bad])
        error = to_rollmesh_error(caught.value, "uploading")
        assert isinstance(error, PayloadError)
        return error.field

    assert await refused(data=b"") == "data"
    assert await refused(data=b"x" * (PIECE_BYTES + 1)) == "data"
    assert await refused(piece=MAX_PIECES) == "piece"
    assert await refused(member=1) == "member"
    assert await refused(group_id="train-9") == "group_id"
    assert (await upload(generator, [])).pieces == 0
    good[0].member = 9
    with pytest.raises(Exception, match="the group has fewer members"):
        await upload(generator, good[:1])
    good[0].table = "nonsense"
    with pytest.raises(Exception, match="table"):
        await upload(generator, good[:1])
    assert (await generator.client.describe("train")).bytes == 0
    for other in ("no-such-group", ""):
        good[0].table, good[0].member, good[0].group_id = "train", 0, other
        with pytest.raises(Exception, match="not a group id"):
            await upload(generator, good[:1])
    good[0].group_id = "train-99"
    assert (await upload(generator, good[:1])).pieces == 0
    assert not await front.access.client.keys(keys_of(front, "train-99"))


@pytest.mark.parametrize("mesh", ["cluster"], indirect=True)
async def test_pieces_spread_over_a_cluster(mesh: Mesh) -> None:
    front, learner, generator, (grant,) = await begin(mesh)
    writes = [large_write(grant, 0, 500_000), large_write(grant, 1, 10)]
    await generator.writer().write(writes)
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert list(group.pieces) == [8, 1]
    refs = [pb.MemberRef(group_id=grant.group_id, member=member) for member in range(2)]
    assert [payload async for payload in learner.client.fetch("train", refs)] == [w.payload for w in writes]
    assert (await learner.train([group], 0)).claimed
    await learner.client.commit("train", 1, 1)
    async with asyncio.timeout(TIMEOUT_S):
        while [key async for key in front.access.scan(keys_of(front, grant.group_id))]:
            await asyncio.sleep(0.02)
