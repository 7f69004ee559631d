"""A group that a front has just sealed is handed on from there, where first come is first served."""

from __future__ import annotations

import asyncio
from typing import Any

from rollmesh.buffer.store.payload_cache import PayloadCache
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh, key_of, make_write

FIFO = {"max_staleness": 4, "order": "fifo"}


async def _waiting(mesh: Mesh) -> tuple[Any, Any, Any, Any, Any]:
    """A front, and a learner that waits for a batch while a generator holds a group."""
    front = await mesh.front(buffer=FIFO)
    learner = await mesh.learner(front)
    generator = await mesh.generator(front)
    await learner.seed(1, 4)
    admission = generator.admission()
    admission.update(credits=1, serving=PolicyVersion(learner.incarnation, 0))
    (grant,) = await generator.grants(admission, 1)
    sampler = learner.sampler()
    sampler.request(2, 0)
    # The stream is open, and its credits known, once it says why it waits.
    async with asyncio.timeout(TIMEOUT_S):
        while not sampler.waiting_reason.startswith("waits for groups"):
            await sampler.next(0.05)
    return front, learner, generator, sampler, grant


async def test_its_payloads_are_not_read_back(mesh: Mesh) -> None:
    front, learner, generator, sampler, grant = await _waiting(mesh)
    version = PolicyVersion(learner.incarnation, 0)
    async with front.access.client.monitor() as monitor:
        await generator.finish(generator.writer(), [grant], version)
        (group,) = await learner.collect(sampler, 1)
        await front.access.client.echo("done")
        commands = []
        while not commands or not commands[-1].startswith("ECHO"):
            commands.append((await monitor.next_command())["command"])
    assert group.group_id == grant.group_id
    assert all(len(payload) > 0 for payload in learner.payloads[group.group_id])
    stored = [key_of(front, make_write(grant, member, [version] * 5)) for member in range(2)]
    assert list(learner.payloads[group.group_id]) == [await front.access.client.get(key) for key in stored]
    for key in stored:
        assert [command.split()[0] for command in commands if key in command] == ["SET"], "it was at hand"


async def test_what_was_set_and_never_counted_is_not_taken_for_what_was_written(mesh: Mesh) -> None:
    """The member was sampled again under the same lease."""
    front, learner, generator, sampler, grant = await _waiting(mesh)
    version = PolicyVersion(learner.incarnation, 0)
    before = [make_write(grant, member, [version] * 7) for member in range(2)]
    await front.access.client.mset({key_of(front, write): write.payload for write in before})
    writes = [make_write(grant, member, [version]) for member in range(2)]
    results = await generator.writer().write([writes[0], make_write(grant, 0, [version] * 3), writes[1]])
    assert [r.status for r in results] == [pb.WRITE_STATUS_STORED, pb.WRITE_STATUS_DUPLICATE, pb.WRITE_STATUS_STORED]
    (group,) = await learner.collect(sampler, 1)
    assert (
        list(learner.payloads[group.group_id])
        == await front.access.client.mget([key_of(front, write) for write in writes])
        == [write.payload for write in writes]
    )


def test_the_oldest_go_first_and_every_byte_is_counted_once() -> None:
    kept = PayloadCache(limit=10)
    kept.put([("a", b"1234"), ("b", b"1234")])
    kept.put([("b", b"12")])
    assert kept.bytes == 6
    kept.put([("c", b"123456")])
    assert (kept.pop("a"), kept.pop("b"), kept.pop("c"), kept.bytes) == (None, b"12", b"123456", 0)
    kept.put([("d", b"1")])
    kept.clear()
    assert (kept.pop("d"), kept.bytes) == (None, 0)
