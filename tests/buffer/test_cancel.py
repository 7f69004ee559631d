"""Generators are told at once which groups need no more work: over any front, and once they are back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rollmesh.buffer.client.client import AdmitStream, Lease
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.store import Store
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Mesh, make_config, make_task, refs
from tests.buffer.protocol.test_leases import revived
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)


class Told:
    """Cancellations that came to a stream, as (group, lease)."""

    def __init__(self, stream: AdmitStream) -> None:
        self._queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        stream.on_cancelled = self._take

    def _take(self, leases: Sequence[pb.LeaseRef]) -> None:
        for lease in leases:
            self._queue.put_nowait((lease.group_id, lease.lease_id))

    async def next(self, count: int) -> set[tuple[str, str]]:
        async with asyncio.timeout(TIMEOUT_S):
            return {await self._queue.get() for _ in range(count)}

    @property
    def silent(self) -> bool:
        return self._queue.empty()


def keys(grants: Sequence[pb.GroupGrant]) -> set[tuple[str, str]]:
    return {(g.group_id, g.lease_id) for g in grants}


async def start(
    mesh: Mesh, generator: Generator, count: int, table: str = "train"
) -> tuple[AdmitStream, Told, list[pb.GroupGrant]]:
    admission = generator.admission(table)
    told = Told(admission)
    admission.update(count, V0)
    return admission, told, await generator.grants(admission, count)


async def test_hopeless_groups_are_cancelled_over_another_front_than_evicts_them(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner = await mesh.learner(left)
    first, second = await mesh.generator(left), await mesh.generator(right)
    await learner.seed(1, 4)
    (_, one, mine), (_, two, yours) = await start(mesh, first, 2), await start(mesh, second, 2)
    # The bound is 1: at version 2 nothing of version 0 can train any more.
    await learner.client.set_policy_version(learner.incarnation, 2)
    assert await one.next(2) == keys(mine)
    assert await two.next(2) == keys(yours)
    counts = await balanced(learner)
    assert (counts.evicted_stale, counts.cancelled, counts.pending) == (4, 4, 4)
    assert counts.reasons["evicted_stale/hopeless"] == 4


async def test_a_cancellation_waits_for_a_generator_whose_stream_is_broken(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"reconnect_grace_s": 30.0, "redis": mesh.redis_url})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission, _, grants = await start(mesh, generator, 1)
    await admission.close()
    await learner.client.set_policy_version(learner.incarnation, 2)
    async with asyncio.timeout(TIMEOUT_S):
        while (await balanced(learner)).cancelled == 0:
            await asyncio.sleep(0.02)
    twin = await revived(mesh, front, generator)
    again = twin.admission()
    told = Told(again)
    again.update(0, V0)
    assert await told.next(1) == keys(grants)


async def test_a_holder_that_comes_back_hears_that_another_has_its_group(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, first, second = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission, _, lost = await start(mesh, first, 1)
    await admission.close()
    _, other, taken = await start(mesh, second, 1)
    assert taken[0].group_id == lost[0].group_id
    twin = await revived(mesh, front, first)
    again = twin.admission()
    told = Told(again)
    again.update(0, V0)
    assert await told.next(1) == keys(lost)
    assert other.silent


async def test_withdrawn_evaluations_are_cancelled_and_given_up_groups_are_not(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    tasks = [make_task(ordinal, pinned=V0) for ordinal in (1, 2)]
    await learner.client.seed("eval", learner.incarnation, tasks)
    admission, told, grants = await start(mesh, generator, 2, "eval")
    given_up, kept = grants
    await generator.client.release("eval", generator.agent.member_id, generator.agent.generation, refs([given_up]))
    await learner.client.seed("eval", learner.incarnation, [], withdraw_pending=True)
    assert await told.next(1) == keys([kept])
    assert admission.waiting_reason is not None
    counts = await balanced(learner, "eval")
    assert (counts.cancelled, counts.reasons["failed/withdrawn"]) == (1, 2)


async def test_a_grant_that_is_cancelled_before_it_was_taken_is_dropped_and_its_credit_returns(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 2)
    admission = generator.admission()
    told = Told(admission)
    admission.update(2, V0)
    async with asyncio.timeout(TIMEOUT_S):
        while (await balanced(learner)).generating < 2:
            await asyncio.sleep(0.02)
    await learner.client.set_policy_version(learner.incarnation, 2)
    stale = await told.next(2)
    admission.update(serving=PolicyVersion(1, 2))
    fresh = await generator.grants(admission, 2)
    assert keys(fresh).isdisjoint(stale)
    assert [g.task.ordinal for g in fresh] == [1, 2]
    assert all(g.parent_group_id for g in fresh)


async def test_those_that_have_no_cancelled_group_are_not_asked_for(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change costs what it concerns, however many streams are open."""
    asked: list[str] = []
    read = Store.read_cancellations

    async def counted(store: Store, table: str, member_id: str, *others: Any) -> list[Lease]:
        asked.append(member_id)
        return await read(store, table, member_id, *others)

    monkeypatch.setattr(Store, "read_cancellations", counted)
    front = await mesh.front()
    learner, mine = await mesh.learner(front), await mesh.generator(front)
    others = [await mesh.generator(front) for _ in range(3)]
    for other in others:
        other.admission().update(0, V0)
        async with asyncio.timeout(TIMEOUT_S):
            while other.agent.member_id not in asked:
                await asyncio.sleep(0.02)
    await learner.seed(1, 1)
    _, told, grants = await start(mesh, mine, 1)
    asked.clear()
    await learner.client.set_policy_version(learner.incarnation, 2)
    assert await told.next(1) == keys(grants)
    assert set(asked) == {mine.agent.member_id}
    notified = Keys(front.run_name).table("train", "cancelled_at")
    async with asyncio.timeout(TIMEOUT_S):
        while await front.access.client.zcard(notified):
            await asyncio.sleep(0.02)
