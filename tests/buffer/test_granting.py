"""Groups go to the least loaded generator, and never to one that is dead or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from typing import Any

import grpc
import pytest

from rollmesh.buffer.client.client import AdmitStream
from rollmesh.buffer.server.admission_dealer import AdmissionDealer, GeneratorDemand
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import buffer_pb2_grpc
from tests import fork_server
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh

V0 = PolicyVersion(1, 0)
ROOMY: dict[str, Any] = {"learner": {"batch": {"groups": 64}}}


async def in_force(stream: AdmitStream, reason: str) -> None:
    """Waits until the front has told why it grants nothing."""
    async with asyncio.timeout(TIMEOUT_S):
        while reason not in stream.waiting_reason:
            await asyncio.sleep(0.02)


async def test_the_idle_generator_is_served_first_and_size_counts(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"redis": mesh.redis_url}, **ROOMY)
    learner = await mesh.learner(front)
    busy, idle = await mesh.generator(front), await mesh.generator(front)
    of_busy, of_idle = busy.admission(), idle.admission()
    of_busy.update(4, V0, outstanding=12)
    of_idle.update(8, V0, outstanding=0)
    for stream in (of_busy, of_idle):
        await in_force(stream, "no prompt tasks")
    # Loads are 12/16 and 0/8: until the idle one has 6 it is the less loaded.
    await learner.seed(1, 6)
    assert len(await idle.grants(of_idle, 6)) == 6
    await learner.seed(7, 8)
    # Now both are loaded alike: one for each.
    assert len(await busy.grants(of_busy, 1)) == len(await idle.grants(of_idle, 1)) == 1


async def test_the_faster_of_two_gets_more_in_proportion(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    offered: dict[int, GeneratorDemand] = {}
    offer = AdmissionDealer.offer
    monkeypatch.setattr(
        AdmissionDealer, "offer", lambda self, demand: (offered.update({id(demand): demand}), offer(self, demand))
    )
    front = await mesh.front(buffer={"redis": mesh.redis_url}, **ROOMY)
    learner = await mesh.learner(front)
    generators = await mesh.generator(front), await mesh.generator(front)
    admissions = [generator.admission() for generator in generators]
    got = [0, 0]
    for admission in admissions:
        admission.update(6, V0, outstanding=0)
        await in_force(admission, "no prompt tasks")
    # Turns instead of seconds: in each, three are done by the one and one by the other, and four new ones come.
    held, seeded = [0, 0], 0

    async def seed_and_take(count: int) -> None:
        nonlocal seeded
        await learner.seed(seeded + 1, seeded + count)
        seeded += count
        taking = [asyncio.create_task(anext(admission)) for admission in admissions]
        for _ in range(count):
            await asyncio.wait(taking, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            place = next(index for index, task in enumerate(taking) if task.done())
            taking[place].result()
            held[place] += 1
            got[place] += 1
            taking[place] = asyncio.create_task(anext(admissions[place]))
        for task in taking:
            task.cancel()
        await asyncio.gather(*taking, return_exceptions=True)

    await seed_and_take(8)
    assert held == [4, 4]
    for _ in range(5):
        for place, done in enumerate((3, 1)):
            held[place] -= done
            admissions[place].update(6 - held[place], outstanding=held[place])
        async with asyncio.timeout(TIMEOUT_S):
            while sorted(demand.outstanding for demand in offered.values()) != sorted(held):
                await asyncio.sleep(0.02)
        await seed_and_take(4)
    assert got == [4 + 15, 4 + 5]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_a_dead_or_hanging_generator_had_goes_to_others(mesh: Mesh, how: signal.Signals) -> None:
    # The lease alone would hold the groups for longer than this waits; the grace is 0.3 s, and patience with a silent
    # stream one second.
    front = await mesh.front(buffer={"redis": mesh.redis_url}, **ROOMY)
    learner, other = await mesh.learner(front), await mesh.generator(front)
    victim = await asyncio.to_thread(
        fork_server.popen, [front.address], module="tests.buffer.lone_generator", stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None
    try:
        assert await asyncio.to_thread(victim.stdout.readline) == "ready\n"
        await learner.seed(1, 1)
        first = (await asyncio.to_thread(victim.stdout.readline)).strip()
        os.kill(victim.pid, how)
        if how == signal.SIGKILL:
            await asyncio.to_thread(victim.wait)
        await learner.seed(2, 5)
        admission = other.admission()
        admission.update(5, V0, outstanding=0)
        found = {grant.group_id: grant for grant in await other.grants(admission, 5)}
        assert found[first].attempt == 2, "the one that was at work on it is gone"
        counts = (await learner.client.describe("train")).counts
        assert (counts.generating, counts.pending) == (5, 0), "all are in the hands of the one that lives"
    finally:
        victim.kill()
        await asyncio.to_thread(victim.wait)
        victim.stdout.close()


async def test_grants_that_never_arrive_go_to_others_while_their_holder_beats(mesh: Mesh) -> None:
    """Its requests come, nothing reaches it any more: each time that its stream is ended it opens another."""
    front = await mesh.front(buffer={"redis": mesh.redis_url}, **ROOMY)
    learner, deaf, other = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    await learner.seed(1, 4)
    stub, agent = buffer_pb2_grpc.BufferStub(deaf.channel), deaf.agent
    first = pb.AdmitRequest(
        table="train", member_id=agent.member_id, generation=agent.generation, credits=4, serving=V0.to_proto()
    )
    first.inventory.SetInParent()

    async def opened_again_and_again() -> None:
        while True:
            call = stub.Admit()
            with suppress(grpc.aio.AioRpcError):
                await call.write(first)
                async for response in call:
                    if response.inventory_within_ms and not granted.is_set():
                        await call.write(first)
                    if response.grants:
                        granted.set()

    granted = asyncio.Event()
    deafness = asyncio.create_task(opened_again_and_again())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await granted.wait()
            admission = other.admission()
            admission.update(4, V0, outstanding=0)
            await other.grants(admission, 4)
    finally:
        deafness.cancel()
        await asyncio.gather(deafness, return_exceptions=True)


async def test_who_has_not_answered_on_a_stream_is_granted_nothing_on_it(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"redis": mesh.redis_url}, **ROOMY)
    learner, deaf = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    stub, agent = buffer_pb2_grpc.BufferStub(deaf.channel), deaf.agent
    request = pb.AdmitRequest(
        table="train", member_id=agent.member_id, generation=agent.generation, credits=1, serving=V0.to_proto()
    )
    request.inventory.SetInParent()
    call = stub.Admit()
    await call.write(request)
    async with asyncio.timeout(TIMEOUT_S):
        while not (response := await call.read()).waiting_reason:
            assert not response.grants
        assert "has not answered" in response.waiting_reason
        assert (await learner.client.describe("train")).counts.pending == 1
        await call.write(request)
        while not (await call.read()).grants:
            pass
    call.cancel()
