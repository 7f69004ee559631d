"""Redis loses what it had acknowledged, under a run: set back in place, emptied, replaced by an older state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.buffer.server.process import BufferFront
from rollmesh.mesh.errors import FencedError, LostStateError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Learner, Mesh, make_config, make_write, refs
from tests.buffer.test_flow import balanced

RULES = {"max_staleness": 1, "lease_s": 3.0}


@pytest.fixture
async def own_redis(tmp_path: Path) -> AsyncIterator[str]:
    """A redis-server for one test, which may empty it."""
    server = EmbeddedRedis(tmp_path / "own", durability="none")
    await server.start()
    yield server.admin_url
    await server.stop()


class Snapshot:
    """All metadata of a run, to be restored under it."""

    def __init__(self, front: BufferFront) -> None:
        self._client: Redis = front.access.client
        self._pattern = f"\\{{rollmesh:{front.run_name}\\}}*"
        self._values: dict[bytes, bytes | None] = {}

    async def take(self) -> None:
        self._values = {
            key: await self._client.dump(key) async for key in self._client.scan_iter(self._pattern, count=1000)
        }

    async def restore(self) -> None:
        """In one transaction, as a replica that is promoted changes everything at once."""
        pipe = self._client.pipeline(transaction=True)
        async for key in self._client.scan_iter(self._pattern, count=1000):
            pipe.delete(key)
        for key, value in self._values.items():
            assert value is not None
            pipe.restore(key, 0, value)
        await pipe.execute()


class Run:
    """A learner and a generator that train version after version."""

    def __init__(self, learner: Learner, generator: Generator) -> None:
        self.learner, self.generator = learner, generator
        self.admission, self.writer, self.sampler = generator.admission(), generator.writer(), learner.sampler()
        self.trained: list[str] = []
        self.ordinals: list[int] = []

    async def step(self) -> None:
        version = self.learner.version
        await self.write(version)
        groups = await self.learner.batch(self.sampler, 2, version)
        assert (await self.learner.train(groups, version)).claimed
        self.trained += [g.group_id for g in groups]
        self.ordinals += [g.task.ordinal for g in groups]

    async def write(self, version: int) -> list[pb.GroupGrant]:
        """Has two groups finished, whatever becomes of them."""
        serving = PolicyVersion(self.learner.incarnation, version)
        self.admission.update(2, serving)
        grants = await self.generator.grants(self.admission, 2)
        await self.generator.finish(self.writer, grants, serving)
        return grants


async def test_a_state_restored_in_place_is_noticed_and_nothing_is_trained_twice(mesh: Mesh) -> None:
    front = await mesh.front(make_config(mesh.folder, mesh.redis_url, buffer={**RULES, "redis": mesh.redis_url}))
    run = Run(await mesh.learner(front), await mesh.generator(front))
    await run.learner.seed(1, 40)
    await run.step()
    snapshot = Snapshot(front)
    await snapshot.take()
    for _ in range(3):
        await run.step()
    await snapshot.restore()
    for _ in range(3):
        await run.step()
    assert len(set(run.trained)) == len(set(run.ordinals)) == 14, "no group, and no prompt, is trained twice"
    assert sum(unknown for _, unknown in run.learner.told) == 6, "six admissions were lost with their claims"
    counts = await balanced(run.learner)
    assert (counts.consumed, counts.trained) == (14, 0)


@pytest.mark.parametrize("restarted", [False, True], ids=["set back", "another process"])
async def test_no_one_gets_anything_until_the_learner_has_spoken(mesh: Mesh, restarted: bool) -> None:
    front = await mesh.front(make_config(mesh.folder, mesh.redis_url, buffer={**RULES, "redis": mesh.redis_url}))
    run = Run(await mesh.learner(front), await mesh.generator(front))
    learner = run.learner
    await learner.seed(1, 40)
    await run.step()
    await run.write(1)
    groups = await learner.batch(run.sampler, 2, 1)
    learner.client.on_lost_state = None
    key = f"{{rollmesh:{front.run_name}}}"
    # As after a restart; or as another front notes that saw the counters go back.
    await front.access.client.hset(key, *(("redis_run_id", "another") if restarted else ("suspect", "1")))
    for verb in (
        learner.client.claim("train", 1, 1, refs(groups)),
        learner.client.seed("train", 1, []),
        learner.client.commit("train", 1, 1),
        learner.client.resume("train", "other", 0, takeover=True),
    ):
        with pytest.raises(LostStateError, match="may have lost"):
            await verb
    run.admission.update(2, PolicyVersion(1, 1))
    async with asyncio.timeout(TIMEOUT_S):
        while "the learner" not in run.admission.waiting_reason:
            await asyncio.sleep(0.02)
    # The failed takeover has made the other one speak for the learner; that one is over.
    with pytest.raises(FencedError):
        await learner.tell()
    other = await mesh.learner(front, 1, takeover=True)
    assert other.told == [(0, 0)]
    assert (await balanced(other)).trained == 2


async def test_an_incarnation_that_never_was_is_not_called_a_loss_of_redis(mesh: Mesh) -> None:
    front = await mesh.front()
    client = (await mesh.learner(front)).client
    client.on_lost_state = None
    for verb in (client.seed("train", 7, []), client.set_policy_version(7, 1), client.commit("train", 7, 1)):
        with pytest.raises(LostStateError, match=r"does not know this learner's incarnation: .* or never existed"):
            await verb


async def test_an_emptied_redis_is_filled_from_what_the_learner_knows(own_redis: str, tmp_path: Path) -> None:
    mesh = Mesh(own_redis, tmp_path)
    try:
        front = await mesh.front(make_config(tmp_path, own_redis, buffer={**RULES, "redis": own_redis}))
        run = Run(await mesh.learner(front), await mesh.generator(front))
        learner = run.learner
        await learner.seed(1, 12)
        for _ in range(3):
            await run.step()
        late = await run.write(3)
        await front.access.client.flushall()
        results = await run.writer.write([make_write(late[0], 0, [PolicyVersion(1, 3)])])
        assert [r.status for r in results] == [pb.WRITE_STATUS_SUPERSEDED], "the group is not known any more"
        # The learner seeds again from where Redis begins; what it has used is passed over.
        assert (await learner.seed(1, 12)).added == 6
        for _ in range(3):
            await run.step()
        assert len(set(run.trained)) == 12
        assert sorted(run.ordinals) == list(range(1, 13)), "every prompt once"
        counts = await balanced(learner)
        assert (counts.consumed, counts.admitted, counts.pending) == (12, 12, 0)
        assert (await learner.client.commit("train", 1, 6)).trained == 12
        await balanced(learner)
    finally:
        await mesh.close()


async def test_a_lost_takeover_is_believed_and_the_learner_before_stays_out(mesh: Mesh) -> None:
    front = await mesh.front(make_config(mesh.folder, mesh.redis_url, buffer={**RULES, "redis": mesh.redis_url}))
    first = Run(await mesh.learner(front), await mesh.generator(front))
    await first.learner.seed(1, 40)
    await first.step()
    snapshot = Snapshot(front)
    await snapshot.take()
    await first.step()
    second = Run(await mesh.learner(front, 1, takeover=True), first.generator)
    second.admission, second.writer = first.admission, first.writer
    await second.step()
    await snapshot.restore()
    await second.step()
    assert second.learner.told
    with pytest.raises(FencedError):
        await first.learner.client.commit("train", 1, 2)
    description = await second.learner.client.describe("train")
    assert (description.policy.incarnation, description.policy.version) == (2, 3)
    assert not set(second.trained) & set(first.trained[:2])
    assert len(set(second.trained)) == len(second.trained)
    await balanced(second.learner)


async def test_a_front_that_has_seen_a_lost_claim_drops_no_request_for_its_version(mesh: Mesh) -> None:
    """The claim went at one front, with the end of what Redis had, and the learner has reported again which groups it
    had used there. The other front still believes in the claim when one group of the batch is to be replaced."""
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 4)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(4, PolicyVersion(1, 0))
    await generator.finish(writer, await generator.grants(admission, 4), PolicyVersion(1, 0))
    await learner.batch(sampler, 1, 0)
    assert front.metrics is not None
    snapshots = front.metrics.front.store.snapshots
    snapshots["train"] = replace(snapshots["train"], u=snapshots["train"].u + 1)
    await learner.batch(sampler, 1, 0)
