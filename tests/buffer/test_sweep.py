"""Stored values that no group owns are found and removed; whatever may still count is left alone."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.buffer.server import background_tasks
from rollmesh.buffer.server.process import BufferFront
from rollmesh.buffer.store.drafts import DraftRef
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.payloads import PayloadRef, digest_of, name_of
from rollmesh.buffer.store.unowned_values import GroupOwnership, sweep_unowned_values
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh, key_of, make_write
from tests.buffer.store.test_drafts import make_draft, values
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)
# Digests of other bytes.
ONE, TWO = "1" * 16, "2" * 16


async def swept(front: BufferFront, age_s: float = 0) -> int:
    return await sweep_unowned_values(front.access, Keys(front.run_name), "train", age_s=age_s, pause_s=0)


@pytest.mark.parametrize("mesh", ["one", "cluster"], indirect=True)
async def test_values_without_an_owner_are_removed_and_counted(mesh: Mesh) -> None:
    front, learner, first, _, (grant,) = await mesh.granted()
    second = await mesh.generator(front)
    takeover = second.admission()
    await first.writer().write([make_write(grant, 0, [V0]), make_draft(grant, 1, [V0] * 5)])
    await first.kill()
    takeover.update(1, V0)
    (again,) = await second.grants(takeover, 1)
    gid = again.group_id
    kept = {f"{gid}:0:1", f"{gid}:1:d1-5"}
    assert await values(front) == kept
    name = Keys(front.run_name).payload
    unowned = {
        "the group has ended": name("train", "train-99", 0, 1, ONE),
        "the attempt is over": name("train", gid, 1, 1, ONE),
        "stored by an earlier attempt": name("train", gid, 0, 2, ONE),
        "stored with other bytes": name("train", gid, 0, 1, ONE),
        "replaced draft": name("train", gid, 1, f"d1-3-{ONE}"),
        "piece of an attempt that is over": name("train", gid, 1, 1, ONE, 4),
        "no name of ours": name("train", gid, "x", "y"),
    }
    in_flight = [name("train", gid, 1, *place) for place in ((2, ONE), (2, TWO), (2, ONE, 7), (f"d2-1-{ONE}",))]
    for key in (*unowned.values(), *in_flight):
        await front.access.batch([("SET", key, b"value")])

    assert await swept(front) == 0, "the first pass finds them and gives them little time"
    assert min(await front.access.batch([("TTL", key) for key in unowned.values()])) > 60
    assert await swept(front, age_s=60) == 0
    assert await swept(front) == len(unowned)
    left = await values(front)
    assert left == kept | {f"{gid}:1:2", f"{gid}:1:2:7", f"{gid}:1:d2-1"}
    assert set(await front.access.batch([("TTL", key) for key in in_flight])) == {-1}
    assert (await learner.client.describe("train")).orphans_swept == len(unowned)
    # The group continues from what was left.
    await second.finish(second.writer(), [again], V0)
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert all(learner.payloads[group.group_id])
    await balanced(learner)


async def test_what_a_dead_front_has_set_before_its_verb_stays_for_the_repeated_write(mesh: Mesh) -> None:
    """A value that was marked as unowned would expire under the group that comes to own it."""
    front, learner, generator, _, (grant,) = await mesh.granted()
    writes = [make_write(grant, 0, [V0]), make_draft(grant, 1, [V0] * 3), make_write(grant, 1, [V0])]
    name = Keys(front.run_name).payload
    draft = name("train", grant.group_id, 1, f"d1-3-{digest_of(writes[1].payload)}")
    keys = [key_of(front, writes[0]), draft, key_of(front, writes[2])]
    set_alone = [("SET", key, write.payload, "NX") for key, write in zip(keys, writes, strict=True)]
    assert await front.access.batch(set_alone) == [b"OK"] * 3

    async def never_marked() -> None:
        for _ in range(2):
            assert await swept(front) == 0
        assert [ttl for ttl in await front.access.batch([("TTL", key) for key in keys]) if ttl >= 0] == []

    await never_marked()
    writer = generator.writer()
    for write in writes:
        # The holder repeats what was not answered, through another front: that finds the values.
        (result,) = await writer.write([write])
        assert result.status == pb.WRITE_STATUS_STORED
        await never_marked()
    assert await values(front) == {f"{grant.group_id}:0:1", f"{grant.group_id}:1:1"}
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert learner.payloads[group.group_id] == [writes[0].payload, writes[2].payload]


async def test_what_comes_back_after_a_pass_has_marked_it_is_not_used(mesh: Mesh) -> None:
    """An unowned value stays one: a holder that writes it once more is told that it is superseded."""
    front, learner, first, _, (grant,) = await mesh.granted()
    second = await mesh.generator(front)
    takeover = second.admission()
    write = make_write(grant, 0, [V0])
    key = key_of(front, write)
    await front.access.batch([("SET", key, write.payload, "NX")])
    assert await swept(front) == 0
    assert await front.access.batch([("TTL", key)]) == [-1]
    await first.kill()
    takeover.update(1, V0)
    (again,) = await second.grants(takeover, 1)
    assert await swept(front) == 0
    assert (await front.access.batch([("TTL", key)]))[0] > 0, "its attempt is over"
    (late,) = await second.writer().write([write])
    assert late.status == pb.WRITE_STATUS_SUPERSEDED
    assert await values(front) == set()
    await second.finish(second.writer(), [again], V0)
    assert await values(front) == {f"{grant.group_id}:{member}:2" for member in range(2)}
    await balanced(learner)


async def test_the_service_sweeps_by_itself(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_tasks, "_UNOWNED_AGE_S", 0.1)
    front = await mesh.front()
    learner = await mesh.learner(front)
    await front.access.client.set(Keys(front.run_name).payload("train", "train-99", 0, 1, ONE), b"value")
    async with asyncio.timeout(TIMEOUT_S):
        while (await learner.client.describe("train")).orphans_swept != 1:
            await asyncio.sleep(0.05)
    assert await values(front) == set()


def test_what_a_group_may_own() -> None:
    drafts = (DraftRef(2, 1, 50, ONE), DraftRef(3, 2, 8, ONE))
    owner = GroupOwnership(2, "1100", (PayloadRef(name_of(0, 1, ONE)), PayloadRef(name_of(1, 2, ONE), 3)), drafts)
    own = (
        f"0:1:{ONE}",
        f"1:2:{ONE}:0",
        f"1:2:{ONE}:2",
        f"2:2:{ONE}",
        f"2:2:{TWO}",
        f"2:2:{ONE}:9",
        f"2:d1-50-{ONE}",
        f"2:d2-1-{ONE}",
        f"3:d2-8-{ONE}",
        f"3:d2-9-{TWO}",
    )
    foreign = (
        f"0:2:{ONE}",
        f"0:1:{TWO}",
        f"0:1:{ONE}:0",
        f"1:2:{ONE}",
        f"1:2:{TWO}:0",
        f"1:2:{ONE}:3",
        f"2:1:{ONE}",
        f"2:3:{ONE}",
        f"2:d1-49-{ONE}",
        f"2:d1-51-{ONE}",
        f"3:d2-7-{ONE}",
        f"3:d2-8-{TWO}",
        f"0:d2-9-{ONE}",
        f"4:2:{ONE}",
        "0:1",
        "2:2",
        "2:d2-1",
        "",
        "2:dx",
    )
    assert [name for name in own if not owner.may_own(name)] == []
    assert [name for name in foreign if owner.may_own(name)] == []


async def test_a_front_whose_upkeep_fails_ends_and_says_why(mesh: Mesh) -> None:
    front = await mesh.front()
    await front.access.client.sadd(Keys(front.run_name).table("train", "trash"), "not of ours")
    async with asyncio.timeout(TIMEOUT_S):
        error = await front.failed()
    assert "job remove_ended_values" in str(error), "without it, memory would not be returned, without a word"
