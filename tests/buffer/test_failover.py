"""One of two fronts is killed, hangs, or is told to go: nothing is lost, nothing doubles, and the work continues."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
import pytest

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.redis_url import parse_redis_url
from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import buffer_pb2_grpc
from tests.buffer.front_processes import Fronts, together
from tests.buffer.mesh_fixture import START_S, TIMEOUT_S, Generator, Learner, Mesh, make_config, make_write, refs
from tests.buffer.test_crashes import train_for
from tests.buffer.test_flow import balanced
from tests.secrets_here import files_with, processes_with

V0 = PolicyVersion(1, 0)


@pytest.fixture
async def fronts(mesh: Mesh) -> AsyncIterator[Fronts]:
    owner = Fronts(make_config(mesh.folder, mesh.redis_url), mesh.folder)
    yield owner
    await owner.close()


async def until(learner: Learner, version: int) -> None:
    """Waits until batches up to `version` are claimed."""
    async with asyncio.timeout(START_S):
        while (await learner.client.describe("train")).next_train_version < version:
            await asyncio.sleep(0.02)


async def audit(learner: Learner, claimed: set[str], steps: int) -> None:
    counts = await balanced(learner)
    assert len(claimed) == 2 * steps
    assert (counts.consumed, counts.evicted_stale, counts.failed) == (2 * steps, 0, 0)


async def test_a_front_killed_a_front_that_hangs_and_a_front_that_comes_later(mesh: Mesh, fronts: Fronts) -> None:
    killed, hung = await fronts.start(2)
    mesh_address = together(killed, hung)
    learner, generator = await mesh.learner(mesh_address), await mesh.generator(mesh_address)
    password = str(parse_redis_url(mesh.redis_url).password)
    assert password not in generator.agent.config_json
    assert processes_with([password], killed.process.pid, hung.process.pid) == []
    await learner.seed(1, 200)
    run = asyncio.create_task(train_for(learner, generator, 0, 29))
    await until(learner, 5)
    await killed.end(signal.SIGKILL)
    await until(learner, 10)
    (late,) = await fronts.start(1)
    for actor in (learner, generator):
        async with asyncio.timeout(TIMEOUT_S):
            while late.address not in actor.channel.addresses:
                await asyncio.sleep(0.1)
                await actor.agent.heartbeat()
    hung.process.send_signal(signal.SIGSTOP)
    await until(learner, 20)
    hung.process.send_signal(signal.SIGCONT)
    await audit(learner, await run, 30)
    assert files_with([password], mesh.folder) == ["redis.password"]


async def test_a_front_that_wakes_up_takes_nothing_in_the_name_of_those_who_left_it(mesh: Mesh, fronts: Fronts) -> None:
    left, right = await fronts.start(2)
    learner, generator = await mesh.learner(left), await mesh.generator(left)
    member_id, generation = generator.agent.member_id, generator.agent.generation
    # Both wait at the front that hangs, with credits: it would grant and lease as soon as it can. Their connections
    # stay open, as half of a cut one does, so that nothing tells it that they have gone.
    there = buffer_pb2_grpc.BufferStub(open_channel(right.address, SecuritySection()))
    admitting, sampling = there.Admit(), there.Sample()
    request = pb.AdmitRequest(
        table="train", member_id=member_id, generation=generation, credits=2, serving=V0.to_proto()
    )
    request.inventory.SetInParent()
    await admitting.write(request)
    await admitting.read()
    # It is asked what it holds, and answers: without that it would be granted nothing.
    await admitting.write(request)
    await sampling.write(pb.SampleRequest(table="train", incarnation=1, credits=2, for_version=1))
    async with asyncio.timeout(TIMEOUT_S):
        for call in (admitting, sampling):
            while not (await call.read()).waiting_reason:
                pass
    right.process.send_signal(signal.SIGSTOP)
    sampler, admission, writer = learner.sampler(), generator.admission(), generator.writer()
    admission.update(0, V0)
    sampler.request(2, 0)
    async with asyncio.timeout(TIMEOUT_S):
        while sampler.waiting_reason.startswith("connecting") or admission.waiting_reason.startswith("connecting"):
            await asyncio.sleep(0.02)
    await learner.seed(1, 8)
    right.process.send_signal(signal.SIGCONT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(TIMEOUT_S):
            while await admitting.read():
                pass
    assert "a newer stream" in str(caught.value.details())
    # Two for the learner's new stream, and one more, which only the old one has asked for.
    admission.update(3)
    await generator.finish(writer, await generator.grants(admission, 3), V0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(TIMEOUT_S):
            while await sampling.read():
                pass
    assert "a newer stream" in str(caught.value.details())
    groups = await learner.collect(sampler, 2)
    assert (await learner.train(groups, 0)).claimed


async def test_every_verb_may_be_said_again_to_another_front(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner, other = await mesh.learner(left), Learner(right.address, "learner")
    mesh.adopt(other)
    other.incarnation = learner.incarnation
    generator, elsewhere = await mesh.generator(left), Generator(right.address, "generator")
    mesh.adopt(elsewhere)
    elsewhere.agent.member_id, elsewhere.agent.generation = generator.agent.member_id, generator.agent.generation
    assert ((await learner.seed(1, 4)).added, (await other.seed(1, 4)).added) == (4, 0)
    admission = generator.admission()
    admission.update(3, V0)
    grants = await generator.grants(admission, 3)
    lent = [pb.LeaseRef(group_id=grants[2].group_id, lease_id=grants[2].lease_id)]
    released = [
        await who.client.release("train", generator.agent.member_id, generator.agent.generation, lent)
        for who in (generator, elsewhere)
    ]
    assert [answer.released for answer in released] == [1, 0]
    writes = [make_write(grant, member, [V0]) for grant in grants[:2] for member in range(2)]
    statuses = [{r.status for r in await who.writer().write(writes)} for who in (generator, elsewhere)]
    assert statuses == [{pb.WRITE_STATUS_STORED}, {pb.WRITE_STATUS_DUPLICATE}]
    groups = await learner.batch(learner.sampler(), 2, 0)
    claims = [await who.client.claim("train", 1, 0, refs(groups)) for who in (learner, other)]
    assert [claim.claimed for claim in claims] == [True, True]
    assert [await who.client.set_policy_version(1, 1) for who in (learner, other)] == [1, 1]
    trained = [(await who.client.commit("train", 1, 1, "here")).trained for who in (learner, other)]
    assert trained == [2, 0]
    nacks = [
        (await who.client.nack("train", 1, refs(groups), pb.NACK_DISPOSITION_FAIL, "late")).changed
        for who in (learner, other)
    ]
    assert nacks == [0, 0], "what is trained stays so"
    counts = await balanced(other)
    assert (counts.trained, counts.uses, counts.duplicate_writes) == (2, 2, 4)


async def test_without_any_front_a_client_gives_up_in_words(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(together(front, front))
    await mesh.stop_front(front)
    learner.client._retry_s = 0.5
    with pytest.raises(UnreachableError, match="describing a table"):
        await learner.client.describe("train")
