"""Drafts of unfinished members: the group continues from the tokens of a lost generator, within the bound."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

from rollmesh.buffer.client.client import PendingWrite
from rollmesh.buffer.server.process import BufferFront
from rollmesh.mesh.trajectory.payload_codec import Trajectory, decode, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh, head_of_write, make_config, make_task, make_write
from tests.buffer.packed import read_counter
from tests.buffer.protocol.test_leases import revived
from tests.buffer.test_flow import balanced

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


def make_draft(grant: pb.GroupGrant, member: int, versions: list[PolicyVersion]) -> PendingWrite:
    count = len(versions)
    payload = encode(
        Trajectory(
            np.arange(count, dtype=np.int32),
            np.full(count, -1, np.float32),
            np.ones(count, np.uint8),
            VersionRuns.merged((1, version) for version in versions),
        )
    )
    head = head_of_write(grant, trajectory.MemberMeta(member=member))
    head.draft = True
    return PendingWrite(head, payload)


async def values(front: BufferFront) -> set[str]:
    """Names of the stored payloads and drafts, without what they have in common, and without their digests."""
    found = [key.decode() async for key in front.access.scan(f"rollmesh:{front.run_name}:train:v:*")]
    return {re.sub("[:-][0-9a-f]{16}", "", key.partition(":v:")[2]) for key in found}


@pytest.mark.parametrize("mesh", ["one", "cluster"], indirect=True)
async def test_the_next_holder_goes_on_from_the_drafts_of_a_killed_generator(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner, first, second = await mesh.learner(left), await mesh.generator(left), await mesh.generator(right)
    await learner.seed(1, 1)
    admission, writer = first.admission(), first.writer()
    admission.update(1, V0)
    (grant,) = await first.grants(admission, 1)
    drafts = [make_draft(grant, 1, [V0] * length) for length in (3, 7, 5)]
    results = await writer.write([make_write(grant, 0, [V0]), *drafts])
    stored, duplicate = pb.WRITE_STATUS_STORED, pb.WRITE_STATUS_DUPLICATE
    assert [r.status for r in results] == [stored, stored, stored, duplicate], "a shorter draft came late"
    assert not any(r.sealed for r in results)
    counts = await balanced(learner)
    assert (counts.generating, counts.duplicate_writes) == (1, 0)
    await first.kill()

    takeover = second.admission()
    takeover.update(1, V0)
    (again,) = await second.grants(takeover, 1)
    assert (again.group_id, again.attempt, list(again.members_done)) == (grant.group_id, 2, [0])
    assert [(d.member, d.payload) for d in again.drafts] == [(1, drafts[1].payload)]
    late = await second.writer().write([drafts[2], make_draft(again, 0, [V0]), make_draft(again, 1, [V0] * 8)])
    assert [r.status for r in late] == [pb.WRITE_STATUS_SUPERSEDED, duplicate, stored]
    await second.finish(second.writer(), [again], V0)
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert [len(decode(p).response_ids) for p in learner.payloads[group.group_id]] == [1, 5]
    assert await values(left) == {f"{group.group_id}:0:1", f"{group.group_id}:1:2"}


async def test_a_draft_over_the_bound_is_not_handed_out_and_its_member_begins_anew(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, first, second = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission, writer = first.admission(), first.writer()
    await learner.client.set_policy_version(learner.incarnation, 1)
    admission.update(1, V1)
    (grant,) = await first.grants(admission, 1)
    # A member that continues from an older draft than the grant: its own versions count, not the grant's.
    await writer.write([make_draft(grant, 0, [V0, V1]), make_draft(grant, 1, [V1])])
    await first.kill()
    takeover = second.admission()
    takeover.update(0, V1)
    async with asyncio.timeout(TIMEOUT_S):
        while await read_counter(front, "train", "orphaned") == 0:
            await asyncio.sleep(0.02)
    await learner.client.set_policy_version(learner.incarnation, 2)
    takeover.update(1, PolicyVersion(1, 2))
    (again,) = await second.grants(takeover, 1)
    assert (again.group_id, again.attempt) == (grant.group_id, 2)
    assert [d.member for d in again.drafts] == [1], "version 0 cannot train at version 2 with a bound of 1"
    await second.finish(second.writer(), [again], PolicyVersion(1, 2))
    (group,) = await learner.batch(learner.sampler(), 1, 2)
    assert group.group_id == grant.group_id


async def test_the_deadline_of_a_group_counts_the_drafts_that_it_goes_on_from(mesh: Mesh) -> None:
    front, learner, first, _, (grant,) = await mesh.granted()
    second = await mesh.generator(front)
    writer = first.writer()
    await writer.write([make_draft(grant, 0, [V0] * 4)])
    await learner.client.set_policy_version(learner.incarnation, 1)
    await first.kill()
    takeover = second.admission()
    takeover.update(1, V1)
    (again,) = await second.grants(takeover, 1)
    assert len(again.drafts) == 1
    # Granted at version 1, the group could train at version 2, were it not for the tokens of version 0.
    await learner.client.set_policy_version(learner.incarnation, 2)
    async with asyncio.timeout(TIMEOUT_S):
        while not (counts := await balanced(learner)).evicted_stale:
            await asyncio.sleep(0.02)
    assert counts.reasons["evicted_stale/hopeless"] == 1
    described = await learner.client.describe("train")
    assert dict(described.evicted_by_tokens) == {4: 1}
    async with asyncio.timeout(TIMEOUT_S):
        while await values(front):
            await asyncio.sleep(0.02)


async def test_drafts_of_many_bytes_come_in_several_messages_with_one_grant(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, first, second = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    await learner.client.seed("train", learner.incarnation, [make_task(1, n=4), make_task(2)])
    admission, writer = first.admission(), first.writer()
    admission.update(2, V0)
    grant, small = await first.grants(admission, 2)
    # Together more than a message should have.
    drafts = [make_draft(grant, member, [V0] * 40_000) for member in range(4)] + [make_draft(small, 0, [V0] * 3)]
    for draft in drafts:
        (result,) = await writer.write([draft])
        assert result.status == pb.WRITE_STATUS_STORED
    await first.kill()
    takeover = second.admission()
    sizes: list[int] = []
    received = takeover._on_response

    def measured(response: pb.AdmitResponse) -> None:
        sizes.append(response.ByteSize())
        received(response)

    takeover._on_response = measured  # type: ignore[method-assign]
    takeover.update(2, V0)
    again = {g.group_id: g for g in await second.grants(takeover, 2)}
    whole = again[grant.group_id]
    assert whole.task.ordinal == 1
    assert {d.member: d.payload for d in whole.drafts} == {d.head.meta.member: d.payload for d in drafts[:4]}
    assert [d.payload for d in again[small.group_id].drafts] == [drafts[4].payload]
    assert max(sizes) < 1 << 20 < sum(sizes)


async def test_a_process_that_is_back_under_its_name_gets_its_drafts(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"reconnect_grace_s": 30.0, "redis": mesh.redis_url})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    draft = make_draft(grant, 1, [V0] * 6)
    await generator.writer().write([draft])
    twin = await revived(mesh, front, generator)
    again = twin.admission()
    again.update(0, V0)
    (same,) = await twin.grants(again, 1)
    assert (same.lease_id, same.attempt) == (grant.lease_id, 1)
    assert [(d.member, d.payload) for d in same.drafts] == [(1, draft.payload)]


async def test_a_repeated_write_of_an_earlier_attempt_does_not_take_the_stored_value_away(mesh: Mesh) -> None:
    front, learner, first, _, (grant,) = await mesh.granted()
    second = await mesh.generator(front)
    write = make_write(grant, 0, [V0])
    await first.writer().write([write])
    await first.kill()
    takeover, writer = second.admission(), second.writer()
    takeover.update(1, V0)
    (again,) = await second.grants(takeover, 1)
    (repeated,) = await writer.write([write])
    assert repeated.status == pb.WRITE_STATUS_DUPLICATE
    await second.finish(writer, [again], V0)
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert learner.payloads[group.group_id][0] == write.payload


async def test_malformed_drafts_are_rejected_by_field(mesh: Mesh) -> None:
    front, _, generator, _, (grant,) = await mesh.granted()
    cut, empty, outside = make_draft(grant, 0, [V0]), make_draft(grant, 0, []), make_draft(grant, 9, [V0])
    cut.payload = cut.payload[:-1]
    results = await generator.writer().write([cut, empty, outside])
    assert [(r.status, r.field) for r in results] == [
        (pb.WRITE_STATUS_REJECTED, field) for field in ("payload", "tokens", "meta.member")
    ]
    assert await values(front) == set()


async def test_what_one_message_makes_useless_is_removed_and_nothing_else(mesh: Mesh) -> None:
    """Members of several groups travel together; each draft that is dropped is the one of its group."""
    front, _, generator, _, (first, second) = await mesh.granted(2)
    results = await generator.writer().write(
        [
            make_draft(first, 0, [V0] * 4),
            make_draft(second, 0, [V0] * 4),
            make_draft(second, 0, [V0] * 3),
            make_write(first, 1, [V0]),
            make_draft(second, 1, [V0] * 6),
            make_write(second, 1, [V0]),
        ]
    )
    stored = pb.WRITE_STATUS_STORED
    assert [r.status for r in results] == [stored, stored, pb.WRITE_STATUS_DUPLICATE, stored, stored, stored]
    one, two = first.group_id, second.group_id
    assert await values(front) == {f"{one}:0:d1-4", f"{one}:1:1", f"{two}:0:d1-4", f"{two}:1:1"}
