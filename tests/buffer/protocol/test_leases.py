"""Generators that vanish, pause and come back; streams that break; what is delivered twice."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.errors import OldGenerationError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import LEASE_S, TIMEOUT_S, Generator, HasAddress, Mesh, make_write, nothing_within, refs
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)


async def revived(mesh: Mesh, front: HasAddress, old: Generator) -> Generator:
    """The same process as `old`, on a new connection: same member id."""
    generator = await mesh.generator(front)
    await generator.agent.stop()
    generator.agent.member_id = old.agent.member_id
    generator.agent.generation = old.agent.generation
    return generator


async def test_a_killed_generator_loses_its_groups_after_the_grace_and_keeps_its_members(mesh: Mesh) -> None:
    front, learner, first, _, grants = await mesh.granted(2)
    second = await mesh.generator(front)
    await first.writer().write([make_write(grants[0], 1, [V0])])
    await first.kill()
    takeover, writer = second.admission(), second.writer()
    takeover.update(2, V0)
    # They come after the grace: nothing here waits as long as the lease's term.
    again = {g.group_id: g for g in await second.grants(takeover, 2)}
    assert {g.group_id for g in grants} == set(again)
    assert list(again[grants[0].group_id].members_done) == [1]
    assert {g.attempt for g in again.values()} == {2}
    await second.finish(writer, list(again.values()), V0)
    groups = await learner.batch(learner.sampler(), 2, 0)
    assert all(len(p) > 0 for g in groups for p in learner.payloads[g.group_id])
    counts = await balanced(learner)
    assert (counts.admitted, counts.readmissions) == (2, 2)


async def test_the_last_holder_may_still_write_until_another_has_the_group(mesh: Mesh) -> None:
    front, _, first, _, (grant,) = await mesh.granted()
    second = await mesh.generator(front)
    writer = first.writer()
    released = await first.client.release("train", first.agent.member_id, first.agent.generation, refs([grant]))
    assert released.released == 1
    (paid_for,) = await writer.write([make_write(grant, 0, [V0])])
    assert paid_for.status == pb.WRITE_STATUS_STORED
    takeover = second.admission()
    takeover.update(1, V0)
    (again,) = await second.grants(takeover, 1)
    assert list(again.members_done) == [0]
    (late,) = await writer.write([make_write(grant, 1, [V0])])
    assert late.status == pb.WRITE_STATUS_SUPERSEDED


async def test_a_heartbeat_gives_the_leases_of_its_holder_a_new_term(mesh: Mesh) -> None:
    front, _, generator, _, (grant,) = await mesh.granted()

    async def end_of_term() -> float:
        holders = Keys(front.run_name).table("train", "holders")
        score = await front.access.client.zscore(holders, generator.agent.member_id)
        assert score is not None
        return float(score)

    first = await end_of_term()
    async with asyncio.timeout(TIMEOUT_S):
        # By the clock of Redis, in milliseconds.
        while await end_of_term() <= first:
            await generator.agent.heartbeat()
    results = await generator.finish(generator.writer(), [grant], V0)
    assert results[-1].sealed


async def test_grants_lost_with_a_broken_stream_are_delivered_again(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"reconnect_grace_s": LEASE_S, "redis": mesh.redis_url})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 2)
    admission = generator.admission()
    admission.update(2, V0)
    grants = await generator.grants(admission, 2)
    twin = await revived(mesh, front, generator)
    again = twin.admission()
    again.update(0, V0)
    assert {g.lease_id for g in await twin.grants(again, 2)} == {g.lease_id for g in grants}
    assert (await balanced(learner)).readmissions == 0


async def test_groups_lost_with_a_broken_sample_stream_are_delivered_again_once(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"reconnect_grace_s": LEASE_S, "redis": mesh.redis_url})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 4)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(4, V0)
    await generator.finish(writer, await generator.grants(admission, 4), V0)
    groups = await learner.batch(sampler, 2, 0)
    await sampler.close()
    fresh = learner.sampler()
    again = await learner.batch(fresh, 2, 0)
    assert {g.lease_id for g in again} == {g.lease_id for g in groups}
    assert await nothing_within(fresh.next(TIMEOUT_S)), "the batch of version 0 has two groups, no more"
    assert (await learner.train(again, 0)).claimed


async def test_an_old_connection_generation_cannot_act(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    old = generator.agent.generation
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    await generator.agent._join(TIMEOUT_S)
    assert generator.agent.generation > old
    with pytest.raises(OldGenerationError):
        await generator.client.release("train", generator.agent.member_id, old, refs([grant]))
    with pytest.raises(OldGenerationError):
        await generator.client.release("train", "stranger", 0, refs([grant]))
    held = await generator.client.release("train", generator.agent.member_id, generator.agent.generation, refs([grant]))
    assert held.released == 1


async def test_a_group_that_loses_too_many_holders_fails(mesh: Mesh) -> None:
    front = await mesh.front(rollout={"n": 2, "max_attempts": 2})
    learner = await mesh.learner(front)
    await learner.seed(1, 1)
    for _ in range(2):
        generator = await mesh.generator(front)
        admission = generator.admission()
        admission.update(1, V0)
        await generator.grants(admission, 1)
        await generator.kill()
    async with asyncio.timeout(TIMEOUT_S):
        while (counts := await balanced(learner)).failed == 0:
            await asyncio.sleep(0.05)
    assert counts.reasons["failed/attempts_exhausted"] == 1


async def test_leaving_in_order_hands_groups_on_at_once(mesh: Mesh) -> None:
    front, _, first, _, (grant,) = await mesh.granted()
    second = await mesh.generator(front)
    takeover = second.admission()
    takeover.update(1, V0)
    await first.agent.leave()
    (again,) = await second.grants(takeover, 1)
    assert (again.group_id, again.attempt) == (grant.group_id, 2)
