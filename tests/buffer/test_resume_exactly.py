"""A learner is killed between two commits: its successor is offered exactly what was not committed.

That is: the groups used after the last commit, those leased, and those ready; nothing else, and none is missing. The
generator lives on: what it was working on comes as well, once it is finished.
"""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Learner, Mesh, make_config, make_write
from tests.buffer.test_flow import balanced

STEPS = 4


class Life:
    """A learner's life until it is killed, and what became of each group."""

    def __init__(self) -> None:
        self.used: dict[int, set[str]] = {}
        self.leased: set[str] = set()
        self.ready: set[str] = set()
        self.unfinished: list[pb.GroupGrant] = []


async def live(learner: Learner, generator: Generator, *, commit_each: bool, committed: int) -> Life:
    """Trains `STEPS` batches, leases half of the next, leaves two groups ready and one unfinished; is killed."""
    life = Life()
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    await learner.seed(1, 100)
    for version in range(STEPS):
        serving = PolicyVersion(1, version)
        admission.update(2, serving)
        await generator.finish(writer, await generator.grants(admission, 2), serving)
        groups = await learner.batch(sampler, 2, version)
        assert (await learner.train(groups, version)).claimed
        life.used[version] = {g.group_id for g in groups}
        if (commit_each and version + 1 < STEPS) or version + 1 == committed:
            await learner.client.commit("train", 1, version + 1, "" if commit_each else "checkpoint")
    serving = PolicyVersion(1, STEPS)
    admission.update(4, serving)
    grants = await generator.grants(admission, 4)
    await generator.finish(writer, grants[:3], serving)
    life.leased = {g.group_id for g in await learner.batch(sampler, 1, STEPS)}
    life.ready = {g.group_id for g in grants[:3]} - life.leased
    life.unfinished = grants[3:]
    await writer.write([make_write(life.unfinished[0], 0, [serving])])
    await learner.kill()
    return life


async def offered(learner: Learner, version: int) -> set[str]:
    """All that the buffer has for a learner: batch after batch, given back only at the end."""
    stream = learner.sampler()
    found: set[str] = set()
    while ready := (await learner.client.describe("train")).counts.ready:
        stream.request(2, version)
        wanted = len(found) + min(2, ready)
        async with asyncio.timeout(TIMEOUT_S):
            while len(found) < wanted:
                response = await stream.next(TIMEOUT_S)
                assert response is not None, stream.waiting_reason
                found |= {arrived.leased.group_id for arrived in response.groups}
        version += 1
    await stream.close()
    return found


@pytest.mark.parametrize(
    ("commit_each", "resume_at", "uncommitted"),
    [(False, 2, (2, 3)), (False, 0, (0, 1, 2, 3)), (True, 2, (3,))],
    ids=["checkpoint at 2", "no checkpoint", "each step, checkpoint at 2"],
)
async def test_the_successor_is_offered_exactly_what_was_not_committed(
    mesh: Mesh, commit_each: bool, resume_at: int, uncommitted: tuple[int, ...]
) -> None:
    rules = {"max_staleness": 20, "redis": mesh.redis_url}
    front = await mesh.front(make_config(mesh.folder, mesh.redis_url, buffer=rules))
    generator = await mesh.generator(front)
    life = await live(await mesh.learner(front), generator, commit_each=commit_each, committed=resume_at)
    successor = await mesh.learner(front, resume_at, takeover=True, force=commit_each)
    expected = set().union(*(life.used[version] for version in uncommitted)) | life.leased | life.ready
    assert await offered(successor, resume_at) == expected
    counts = await balanced(successor)
    assert counts.trained == 2 * (STEPS - len(uncommitted))
    assert (counts.generating, counts.consumed, counts.ready) == (1, 0, 0)
    # The same generator, with the same lease, finishes what it had begun under the old learner.
    writer = generator.writer()
    (result,) = await writer.write([make_write(life.unfinished[0], 1, [PolicyVersion(1, STEPS)])])
    assert result.sealed
    late = successor.sampler()
    # The batches before it are full.
    late.request(1, resume_at + len(expected) // 2)
    # The former stream's lease is offered again first.
    offers: set[str] = set()
    async with asyncio.timeout(TIMEOUT_S):
        while life.unfinished[0].group_id not in offers:
            response = await late.next(TIMEOUT_S)
            assert response is not None, late.waiting_reason
            offers |= {arrived.leased.group_id for arrived in response.groups}
