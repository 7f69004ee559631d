"""Metadata and bytes that were written together stay together; no refused write takes away what another has stored."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest

from rollmesh.buffer.server.process import BufferFront
from rollmesh.buffer.store.payloads import digest_of
from rollmesh.mesh.errors import StoreError
from rollmesh.mesh.trajectory.payload_codec import decode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Mesh, PendingWrite, key_of, make_failure, make_write
from tests.buffer.store.test_drafts import make_draft, values
from tests.buffer.store.test_payloads import large_write, named, requests_of, upload
from tests.buffer.test_flow import balanced

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
Batch = Callable[..., Awaitable[Any]]


class Dying:
    """A front that dies in the middle of a write, as its callers see it: their call fails, whatever has been done.

    Steps: `set` (the value is stored, its verb was not run), `verb` (it was, its answer is lost), `removal` (named
    values are not removed).
    """

    def __init__(self, front: BufferFront, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = ""
        store, access = front.metrics.front.store, front.access  # type: ignore[union-attr]
        after_all, remove = access.run_all_after, store._remove

        async def dying(commands: Sequence[Any], verbs: Sequence[Sequence[Any]]) -> list[Any]:
            if self.step and verbs[0][0] == "write":
                if self.step == "set":
                    await access.batch(commands)
                    self._die()
                replies = await after_all(commands, verbs)
                if self.step == "verb":
                    self._die()
                return replies
            return await after_all(commands, verbs)

        async def without(*arguments: Any) -> None:
            if self.step == "removal":
                self._die()
            await remove(*arguments)

        monkeypatch.setattr(access, "run_all_after", dying)
        monkeypatch.setattr(store, "_remove", without)

    def _die(self) -> None:
        self.step = ""
        raise StoreError("died here")


async def wrote(generator: Generator, *writes: PendingWrite) -> pb.WriteResponse:
    """One message, sent once."""
    for write in writes:
        write.head.payload_bytes = len(write.payload)
    request = pb.WriteRequest(
        table="train", writes=[write.head for write in writes], payloads=b"".join(write.payload for write in writes)
    )
    call = generator.client._stub.Write(timeout=TIMEOUT_S)
    await call.write(request)
    response: pb.WriteResponse = await call.read()
    call.cancel()
    return response


async def test_bytes_never_contradict_their_metadata_wherever_a_front_died(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member is sampled, its write breaks off; it is sampled again under the same lease, which may break off too."""
    steps = ("set", "verb", "removal")
    cases = [(first, second) for first in steps for second in ("", *steps)]
    front = await mesh.front(learner={"batch": {"groups": len(cases)}})
    dying = Dying(front, monkeypatch)
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, len(cases))
    admission = generator.admission()
    admission.update(len(cases), V0)
    grants = await generator.grants(admission, len(cases))
    await learner.client.set_policy_version(1, 1)
    for grant, (first, second) in zip(grants, cases, strict=True):
        dying.step = first
        with pytest.raises(grpc.aio.AioRpcError, match="died here"):
            await wrote(generator, make_write(grant, 0, [V0] * 5, reward=0.0))
        again = make_write(grant, 0, [V1] * 5, reward=1.0)
        dying.step = second
        if second:
            with pytest.raises(grpc.aio.AioRpcError, match="died here"):
                await wrote(generator, again)
        await wrote(generator, again, make_write(grant, 1, [V1] * 5))
    groups = {group.group_id: group for group in await learner.batch(learner.sampler(), len(cases), 1)}
    for grant, (first, second) in zip(grants, cases, strict=True):
        group = groups[grant.group_id]
        for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
            held = decode(payload).versions
            assert (held.oldest, held.newest) == (
                PolicyVersion.from_proto(meta.oldest),
                PolicyVersion.from_proto(meta.newest),
            ), (first, second)
        # The member is the value that was written first and counted; one that never counted belongs to none.
        expected = 1.0 if first == "set" else 0.0
        assert group.members[0].reward == expected, (first, second)
    assert (await learner.train(list(groups.values()), 1)).claimed
    await balanced(learner)


async def test_pieces_of_two_samplings_never_mix(mesh: Mesh) -> None:
    _, learner, generator, _, (grant,) = await mesh.granted()
    # All pieces of the first but one are there; the second is as long, and has other bytes.
    before, write = large_write(grant, 1), large_write(grant, 0)
    before.head.meta.member = 0
    await upload(generator, requests_of(before)[:2])
    writer = generator.writer()
    results = await writer.write([write, make_write(grant, 1, [V0])])
    assert [r.status for r in results] == [pb.WRITE_STATUS_STORED] * 2
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    fetched = learner.client.fetch("train", [pb.MemberRef(group_id=group.group_id, member=0)])
    assert [payload async for payload in fetched] == [write.payload]


async def test_a_refused_write_removes_only_what_no_one_can_store_any_more(mesh: Mesh) -> None:
    front, learner, generator, _, (grant,) = await mesh.granted()
    stranger = pb.GroupGrant(group_id=grant.group_id, lease_id="wrong", attempt=grant.attempt)
    # The holder's own write may be on its way at the same moment: these bytes may be those that it has just stored.
    response = await wrote(generator, make_write(stranger, 0, [V0] * 3), make_draft(stranger, 1, [V0] * 2))
    assert list(response.statuses) == [pb.WRITE_STATUS_SUPERSEDED] * 2
    gid = grant.group_id
    assert await values(front) == {f"{gid}:0:1", f"{gid}:1:d1-2"}
    future = pb.GroupGrant(group_id="train-2", lease_id="wrong", attempt=1)
    await wrote(generator, make_write(future, 0, [V0]))
    assert await values(front) == {f"{gid}:0:1", f"{gid}:1:d1-2", "train-2:0:1"}
    # Its member has another value: no one needs this one.
    await wrote(generator, make_write(grant, 0, [V0] * 3))
    await wrote(generator, make_write(stranger, 0, [V0] * 4), make_write(grant, 0, [V0] * 6))
    assert await values(front) == {f"{gid}:0:1", f"{gid}:1:d1-2", "train-2:0:1"}
    await generator.finish(generator.writer(), [grant], V0)
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert learner.payloads[group.group_id][0] == make_write(grant, 0, [V0] * 3).payload


async def test_no_write_of_a_stranger_touches_what_is_stored(mesh: Mesh) -> None:
    """Whatever group, lease, attempt, member, digest and pieces it names."""
    rng = random.Random(7)
    front, learner, generator, _, (sealed, half, drafted) = await mesh.granted(3)
    stranger = await mesh.generator(front)
    stored = [large_write(sealed, 0), make_write(sealed, 1, [V0] * 5), large_write(half, 1)]
    draft = make_draft(drafted, 0, [V0] * 5)
    results = await generator.writer().write([*stored, draft])
    assert [r.status for r in results] == [pb.WRITE_STATUS_STORED] * 4
    kept = {key async for key in front.access.scan(f"rollmesh:{front.run_name}:train:v:*")}
    assert len(kept) == 3 + 1 + 3 + 1
    contents = {key: await front.access.mget([key.decode()]) for key in kept}

    def hostile() -> PendingWrite:
        group = rng.choice((sealed, half, drafted)).group_id
        group += rng.choice(("", "", "", ":0", ":1:0", ":0:1", "|", "0", f":0:1:{digest_of(stored[0].payload)}"))
        grant = pb.GroupGrant(group_id=group, lease_id=rng.choice(("", "x")), attempt=rng.choice((0, 1, 1, 2, 9)))
        member = rng.choice((0, 1, 1, 2, 9))
        kind = rng.randrange(5)
        if kind == 0:
            return make_failure(grant, member)
        if kind == 1:
            return make_draft(grant, member, [V0] * rng.choice((3, 5, 9)))
        if kind == 2:
            return make_write(grant, member, [V0] * rng.choice((3, 5)))
        write = named(large_write(grant, rng.choice((0, 1))), rng.choice((2, 3, 4)))
        write.head.meta.member = member
        write.head.uploaded_digest = rng.choice([digest_of(w.payload) for w in stored] + ["0" * 16, ":", "*"])
        return write

    for _ in range(40):
        response = await wrote(stranger, *(hostile() for _ in range(16)))
        assert pb.WRITE_STATUS_STORED not in response.statuses
        present = {key async for key in front.access.scan(f"rollmesh:{front.run_name}:train:v:*")}
        assert kept <= present
    assert contents == {key: await front.access.mget([key.decode()]) for key in kept}
    assert key_of(front, stored[1]).encode() in kept
    await balanced(learner)
