"""A lone write leases what it seals to the stream that waits for it, in the same round trip."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollmesh.buffer.server.process import BufferFront
from rollmesh.buffer.store.store import Store
from rollmesh.mesh.errors import StoreError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Learner, Mesh, make_config, make_write
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)


def store_of(front: BufferFront) -> Store:
    assert front.metrics is not None
    return front.metrics.front.store


async def world(mesh: Mesh, order: str) -> tuple[BufferFront, Learner, Generator]:
    front = await mesh.front(make_config(mesh.folder, mesh.redis_url, buffer={"order": order}))
    learner = await mesh.learner(front)
    generator = await mesh.generator(front)
    await learner.seed(1, 8)
    return front, learner, generator


async def waiting(front: BufferFront, sampler: Any) -> None:
    """Until the stream has asked, found nothing and waits."""
    sampler.request(1, 0)
    async with asyncio.timeout(TIMEOUT_S):
        # Nothing rings when a stream begins to wait.
        while not store_of(front).handoff.waiting:
            await asyncio.sleep(0.01)


async def finished(generator: Generator, writer: Any, admission: Any) -> str:
    """Writes all members of one more group but the last, then that alone; gives the group."""
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    for member in range(grant.task.n):
        await writer.write([make_write(grant, member, [V0])])
    return str(grant.group_id)


@pytest.mark.parametrize("order", ["fifo", "in_order"])
async def test_what_a_lone_write_seals_reaches_the_learner(
    mesh: Mesh, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, learner, generator = await world(mesh, order)
    sampler, writer, admission = learner.sampler(), generator.writer(), generator.admission()
    if order == "fifo":
        await waiting(front, sampler)

        async def unused(*_: Any) -> None:
            raise AssertionError("a second round trip was made")

        monkeypatch.setattr(store_of(front), "sample", unused)
    else:
        # The first one is not known from the write alone.
        sampler.request(1, 0)
    group_id = await finished(generator, writer, admission)
    (group,) = await learner.collect(sampler, 1)
    assert group.group_id == group_id
    assert (await learner.train([group], 0)).claimed
    await balanced(learner)


async def test_no_more_than_asked_for_is_handed_on(mesh: Mesh) -> None:
    front, learner, generator = await world(mesh, "fifo")
    sampler, writer, admission = learner.sampler(), generator.writer(), generator.admission()
    await waiting(front, sampler)
    first = await finished(generator, writer, admission)
    (group,) = await learner.collect(sampler, 1)
    assert group.group_id == first
    assert not store_of(front).handoff.waiting
    await finished(generator, writer, admission)
    counts = await balanced(learner)
    assert (counts.leased, counts.ready) == (1, 1)


async def test_a_lost_answer_is_made_up_for(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    front, learner, generator = await world(mesh, "fifo")
    sampler, writer, admission = learner.sampler(), generator.writer(), generator.admission()
    await waiting(front, sampler)
    real = front.access.run_all_after
    lost = []

    async def answer_lost(commands: Any, verbs: Any) -> Any:
        replies = await real(commands, verbs)
        if len(verbs) == 2 and replies[-1][2] and not lost:
            lost.append(replies)
            raise StoreError("the connection broke")
        return replies

    monkeypatch.setattr(front.access, "run_all_after", answer_lost)
    group_id = await finished(generator, writer, admission)
    (group,) = await learner.collect(sampler, 1)
    assert lost
    assert group.group_id == group_id
    assert (await balanced(learner)).duplicate_writes == 1


async def test_nothing_is_handed_on_from_a_state_that_has_gone_back(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, learner, generator = await world(mesh, "fifo")
    sampler, writer, admission = learner.sampler(), generator.writer(), generator.admission()
    await waiting(front, sampler)
    real = front.access.run_all_after
    handed = []
    monkeypatch.setattr(store_of(front).handoff, "deliver", lambda _, what: handed.append(what.leased))

    async def gone_back(commands: Any, verbs: Any) -> Any:
        replies = await real(commands, verbs)
        if len(verbs) == 2 and replies[-1][2]:
            replies[-1][1][0] = 0
        return replies

    monkeypatch.setattr(front.access, "run_all_after", gone_back)
    await finished(generator, writer, admission)
    assert handed == [None]


async def test_a_stream_that_has_ended_is_handed_nothing(mesh: Mesh) -> None:
    front, learner, generator = await world(mesh, "fifo")
    old, writer, admission = learner.sampler(), generator.writer(), generator.admission()
    await waiting(front, old)
    await old.close()
    new = learner.sampler()
    await waiting(front, new)
    group_id = await finished(generator, writer, admission)
    (group,) = await learner.collect(new, 1)
    assert group.group_id == group_id
    await new.close()
    # Its last word is the server's: the hold ends with the call.
    counts = await balanced(learner)
    assert (counts.leased, counts.ready) == (1, 0)
