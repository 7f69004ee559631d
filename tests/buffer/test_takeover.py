"""Learners that crash, resume, and linger as zombies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollmesh.mesh.errors import DataError, FencedError, TakeoverRefusedError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import TIMEOUT_S, HasAddress, Learner, Mesh, make_write, refs
from tests.buffer.redis_cluster import single_and_cluster
from tests.buffer.test_flow import balanced


async def run_steps(mesh: Mesh, front: HasAddress, steps: int) -> tuple[Learner, list[list[pb.LeasedGroup]]]:
    """A learner that has claimed `steps` batches and published as many versions; nothing committed."""
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 2 * steps + 2)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    batches = []
    for version in range(steps):
        serving = PolicyVersion(1, version)
        admission.update(2, serving)
        await generator.finish(writer, await generator.grants(admission, 2), serving)
        batches.append(await learner.batch(sampler, 2, version))
        assert (await learner.train(batches[-1], version)).claimed
    return learner, batches


@single_and_cluster
async def test_uses_before_the_resume_point_are_trained_and_later_ones_are_offered_again(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"max_staleness": 4, "redis": mesh.redis_url})
    old, batches = await run_steps(mesh, front, 3)
    await old.kill()
    learner = await mesh.learner(front, 1, takeover=True)
    response = learner.resumed
    assert (response.incarnation, response.trained, response.returned, response.evicted_stale) == (2, 2, 4, 0)
    assert response.seeded == 8
    groups = await learner.batch(learner.sampler(), 2, 1)
    assert [g.group_id for g in groups] == [g.group_id for g in batches[1]]
    assert (await learner.train(groups, 1)).claimed
    counts = await balanced(learner)
    assert (counts.trained, counts.consumed, counts.ready) == (2, 2, 2)


async def test_discarded_versions_age_groups_over_the_bound(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"max_staleness": 0, "redis": mesh.redis_url})
    old, _ = await run_steps(mesh, front, 3)
    await old.client.commit("train", 1, 1, "checkpoint")
    await old.kill()
    learner = await mesh.learner(front, 1, takeover=True)
    # Version 1 trains again on its own batch; version 2 was discarded, so its tokens are two versions away now.
    assert (learner.resumed.returned, learner.resumed.evicted_stale) == (2, 2)
    counts = await balanced(learner)
    assert (counts.trained, counts.reasons["evicted_stale/resumed"], counts.pending) == (2, 2, 4)


async def test_a_zombie_learner_is_fenced_in_every_verb(mesh: Mesh) -> None:
    front = await mesh.front()
    zombie, batches = await run_steps(mesh, front, 1)
    sampler = zombie.sampler()
    sampler.request(1, 1)
    learner = await mesh.learner(front, 0, takeover=True)
    leases = refs(batches[0])
    verbs: list[Callable[[], Awaitable[object]]] = [
        lambda: zombie.seed(9, 9),
        lambda: zombie.client.claim("train", 1, 1, leases),
        lambda: zombie.client.commit("train", 1, 1),
        lambda: zombie.client.nack("train", 1, leases, pb.NACK_DISPOSITION_RELEASE),
        lambda: zombie.client.set_policy_version(1, 2),
    ]
    for verb in verbs:
        with pytest.raises(FencedError):
            await verb()
    with pytest.raises(FencedError):
        await sampler.next(TIMEOUT_S)
    await zombie.agent.heartbeat()
    assert zombie.agent.fenced.is_set()
    counts = await balanced(learner)
    assert (counts.ready, counts.trained) == (2, 0)


async def test_a_running_learner_is_not_replaced_without_takeover(mesh: Mesh) -> None:
    front = await mesh.front()
    await mesh.learner(front)
    with pytest.raises(TakeoverRefusedError, match="holds the run"):
        await mesh.learner(front)


async def test_an_expired_learner_lease_needs_no_takeover(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"lease_s": 0.5, "redis": mesh.redis_url})
    first = await mesh.learner(front)
    await first.kill()
    async with asyncio.timeout(TIMEOUT_S):
        while (await _description(mesh, front)).learner_lease_ms:
            await asyncio.sleep(0.05)
    assert (await mesh.learner(front)).incarnation == 2


async def _description(mesh: Mesh, front: HasAddress) -> pb.DescribeResponse:
    watcher = await mesh.generator(front)
    return await watcher.client.describe("train")


async def test_resuming_below_the_last_commit_is_refused_unless_forced(mesh: Mesh) -> None:
    front = await mesh.front()
    old, _ = await run_steps(mesh, front, 2)
    await old.client.commit("train", 1, 2, "checkpoint")
    await old.agent.leave()
    # A checkpoint that is too old stays so: a restart would mend nothing.
    with pytest.raises(DataError, match="below the last commit"):
        await mesh.learner(front, 1)
    learner = await mesh.learner(front, 1, force=True)
    assert (await balanced(learner)).trained == 4, "its groups stay trained"


async def test_generators_outlive_learners_and_their_groups_stand(mesh: Mesh) -> None:
    front = await mesh.front()
    first, generator = await mesh.learner(front), await mesh.generator(front)
    await first.seed(1, 4)
    admission, writer = generator.admission(), generator.writer()
    admission.update(1, PolicyVersion(1, 0))
    (grant,) = await generator.grants(admission, 1)
    await first.kill()
    learner = await mesh.learner(front, 0, takeover=True)
    results = await writer.write([make_write(grant, m, [PolicyVersion(1, 0)]) for m in range(2)])
    assert results[-1].sealed, "a write is fenced by lease and attempt, not by the learner's incarnation"
    groups = await learner.batch(learner.sampler(), 1, 0)
    assert (await learner.train(groups, 0)).claimed
    await generator.agent.heartbeat()
    assert generator.agent.policy == PolicyVersion(2, 1)
    assert generator.agent.learner is not None
    assert generator.agent.learner.member_id == learner.agent.member_id


async def test_a_first_learner_finds_a_run_in_good_order(mesh: Mesh) -> None:
    """Fronts know a new incarnation at once, though no counter has changed: nothing looks as if Redis had lost it."""
    front = await mesh.front()
    learner = Learner(front.address, "learner")
    await learner.agent.start()
    learner.incarnation = (await learner.take_over(0)).incarnation
    for table in ("train", "eval"):
        sampler = learner.sampler(table)
        sampler.request(1, 0)
        async with asyncio.timeout(TIMEOUT_S):
            while "waits for groups" not in sampler.waiting_reason:
                assert await sampler.next(0.1) is None
    assert learner.told == []
    await learner.close()
