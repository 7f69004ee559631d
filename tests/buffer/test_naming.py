"""A lease lives only while its holder names it: what got lost between Redis and a holder is soon for others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from rollmesh.buffer.client.client import AdmitStream, Lease, ReceivedGroup, SampleStream
from rollmesh.mesh.errors import RollmeshError, UnreachableError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import buffer_pb2_grpc
from tests.buffer.mesh_fixture import LEASE_S, TIMEOUT_S, Actor, Learner, Mesh, make_write, refs
from tests.buffer.test_cancel import Told
from tests.buffer.test_flow import balanced
from tests.buffer.test_redis_loss import Snapshot

V0 = PolicyVersion(1, 0)
SHORT: dict[str, Any] = {"max_staleness": 1, "lease_s": 4.0}


@pytest.fixture(autouse=True)
def _questions_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.buffer.server.lease_roll_call._QUESTIONS_PER_TERM", 20)


def key(held: pb.GroupGrant | pb.LeasedGroup) -> Lease:
    return Lease.of(held)


class Book:
    """Leases that an owner of a stream holds, and says that it holds."""

    def __init__(self, stream: AdmitStream | SampleStream, held: Iterable[pb.GroupGrant | pb.LeasedGroup] = ()) -> None:
        self.leases = {key(lease) for lease in held}
        self.questions = 0
        stream.holdings = self._named

    def _named(self) -> set[Lease]:
        self.questions += 1
        return self.leases

    async def asked(self, times: int) -> None:
        """Waits until the front has asked so often from now on."""
        until = self.questions + times
        async with asyncio.timeout(TIMEOUT_S):
            while self.questions < until:
                await asyncio.sleep(0.02)


async def arrived(stream: SampleStream, count: int) -> list[ReceivedGroup]:
    groups: list[ReceivedGroup] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(groups) < count:
            response = await stream.next(TIMEOUT_S)
            assert response is not None, stream.waiting_reason
            groups += response.groups
    return groups


async def beating(member: Actor) -> None:
    while True:
        await member.agent.heartbeat()
        await asyncio.sleep(SHORT["lease_s"] / 4)


async def lost(stream: SampleStream) -> list[Lease]:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            response = await stream.next(TIMEOUT_S)
            if response is not None and response.lost:
                return [Lease.of(lease) for lease in response.lost]


async def test_a_group_that_its_generator_has_forgotten_goes_to_another(mesh: Mesh) -> None:
    front = await mesh.front(buffer={**SHORT, "redis": mesh.redis_url})
    learner, first, second = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    await learner.seed(1, 3)
    admission, idle = first.admission(), second.admission()
    admission.update(3, V0)
    grants = await first.grants(admission, 3)
    book = Book(admission, grants)
    await first.writer().write([make_write(grants[0], 1, [V0])])
    idle.update(3, V0)
    book.leases.remove(key(grants[0]))
    (again,) = await second.grants(idle, 1)
    assert (again.group_id, again.attempt, list(again.members_done)) == (grants[0].group_id, 2, [1])
    await book.asked(4)
    assert (await balanced(learner)).readmissions == 1, "those that are named stay where they are"


async def test_a_finished_group_that_redis_has_lost_is_done_again(mesh: Mesh) -> None:
    front = await mesh.front(buffer={**SHORT, "redis": mesh.redis_url})
    learner, first, second = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    await learner.seed(1, 2)
    admission, idle, sampler = first.admission(), second.admission(), learner.sampler()
    book = Book(admission)
    admission.update(2, V0)
    grants = await first.grants(admission, 2)
    book.leases.update(map(key, grants))
    idle.update(2, V0)
    snapshot = Snapshot(front)
    await snapshot.take()
    assert [result.sealed for result in await first.finish(first.writer(), grants, V0)] == [False, True] * 2
    book.leases.clear()
    sampler.request(2, 0)
    await arrived(sampler, 2)
    # At the second question it has answered the first: it holds nothing, and lives, so that its leases do not run out.
    await book.asked(2)
    await snapshot.restore()
    async with asyncio.TaskGroup() as tasks:
        beats = tasks.create_task(beating(first))
        again = await second.grants(idle, 2)
        beats.cancel()
    assert {grant.group_id for grant in again} == {grant.group_id for grant in grants}
    await second.finish(second.writer(), again, V0)
    assert (await learner.train(await learner.batch(sampler, 2, 0), 0)).claimed


async def test_a_generator_is_told_of_grants_that_redis_has_lost(mesh: Mesh) -> None:
    front = await mesh.front(buffer={**SHORT, "redis": mesh.redis_url})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 2)
    admission = generator.admission()
    told, book = Told(admission), Book(admission)
    admission.update(1, V0)
    (kept,) = await generator.grants(admission, 1)
    book.leases.add(key(kept))
    snapshot = Snapshot(front)
    await snapshot.take()
    admission.update(1)
    (gone,) = await generator.grants(admission, 1)
    book.leases.add(key(gone))
    await snapshot.restore()
    assert await told.next(1) == {key(gone)}


async def test_a_generator_that_was_away_keeps_what_no_one_else_has_got(mesh: Mesh) -> None:
    """Its leases had ended meanwhile, and its work still counts."""
    front = await mesh.front(buffer={"redis": mesh.redis_url})
    learner, generator, other = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    await learner.seed(1, 2)
    admission = generator.admission()
    admission.update(2, V0)
    kept, gone = grants = await generator.grants(admission, 2)
    store, me = front.metrics.front.store, (generator.agent.member_id, generator.agent.generation)
    assert await store.release("train", *me, [key(gone)]) == 1
    elsewhere = other.admission()
    elsewhere.update(1, V0)
    (again,) = await other.grants(elsewhere, 1)
    assert again.group_id == gone.group_id
    assert await store.release("train", *me, [key(kept)]) == 1
    assert await store.end_unnamed_leases("train", *me, "", map(key, grants)) == (0, [key(gone)])
    results = await generator.finish(generator.writer(), [kept], V0)
    assert {result.status for result in results} == {pb.WRITE_STATUS_STORED}


async def test_a_stream_that_was_replaced_gives_nothing_up(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"redis": mesh.redis_url})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    store, me = front.metrics.front.store, (generator.agent.member_id, generator.agent.generation)
    with pytest.raises(UnreachableError, match="newer stream"):
        await store.release("train", *me, [key(grant)], "an older stream")
    assert await store.end_unnamed_leases("train", *me, "", [key(grant)]) == (0, [])


async def test_a_lease_offered_again_with_which_its_holder_has_finished_is_given_back_at_once(mesh: Mesh) -> None:
    """The term is longer than anything here waits, so that no one waits for a question."""
    front = await mesh.front(buffer={"reconnect_grace_s": LEASE_S, "redis": mesh.redis_url})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    Book(admission)
    port = int(front.address.rsplit(":", 1)[1])
    await mesh.stop_front(front)
    await mesh.front(front._config, port=port)
    admission.update(1)
    (again,) = await generator.grants(admission, 1)
    assert (again.group_id, again.attempt) == (grant.group_id, 2)


async def leased(mesh: Mesh, count: int, **rules: Any) -> tuple[Learner, SampleStream, Book, list[ReceivedGroup]]:
    """Groups that a learner holds."""
    front = await mesh.front(learner={"batch": {"groups": count}}, buffer={**SHORT, "redis": mesh.redis_url, **rules})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 2 * count)
    admission, sampler = generator.admission(), learner.sampler()
    admission.update(count, V0)
    await generator.finish(generator.writer(), await generator.grants(admission, count), V0)
    book = Book(sampler)
    sampler.request(count, 0)
    groups = await arrived(sampler, count)
    book.leases.update(group.lease for group in groups)
    return learner, sampler, book, groups


async def test_what_the_learner_has_forgotten_is_ready_again(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.buffer.store.store.MAX_GROUPS_PER_CALL", 2)
    learner, sampler, book, groups = await leased(mesh, 5)
    forgotten = [groups[1], groups[4]]
    book.leases.difference_update(group.lease for group in forgotten)
    book.leases.add(Lease(groups[2].leased.group_id, "earlier"))
    sampler.request(2, 0)
    again = await arrived(sampler, 2)
    assert {group.leased.group_id for group in again} == {group.leased.group_id for group in forgotten}
    assert {group.lease for group in again}.isdisjoint(group.lease for group in groups)
    kept = [group.leased for group in (groups[0], groups[2], groups[3], *again)]
    assert (await learner.train(kept, 0)).claimed


async def test_the_learner_is_told_which_leases_it_has_lost(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    learner, sampler, _, groups = await leased(mesh, 3)
    gone = refs([groups[0].leased, groups[2].leased])
    await learner.client.nack("train", learner.incarnation, gone, disposition=pb.NACK_DISPOSITION_RELEASE)
    assert set(await lost(sampler)) == {groups[0].lease, groups[2].lease}
    # Groups claimed or released while it named its leases look the same: no warning in a healthy run.
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_refused_claim_says_which_lease_is_refused(mesh: Mesh) -> None:
    learner, sampler, book, groups = await leased(mesh, 2)
    (old, other) = refs([group.leased for group in groups])
    await learner.client.nack("train", learner.incarnation, [old], disposition=pb.NACK_DISPOSITION_RELEASE)
    sampler.request(1, 0)
    (again,) = await arrived(sampler, 1)
    book.leases.add(again.lease)
    (new,) = refs([again.leased])
    response = await learner.client.claim("train", learner.incarnation, 0, [old, new, other])
    assert [(r.group_id, r.lease_id, r.reason) for r in response.refused] == [(*groups[0].lease, "lease_lost")]
    assert (await learner.client.claim("train", learner.incarnation, 0, [new, other])).claimed


async def test_a_holder_that_does_not_say_what_it_holds_loses_its_stream(mesh: Mesh) -> None:
    lease_s = 1.0
    front = await mesh.front(buffer={**SHORT, "lease_s": lease_s, "redis": mesh.redis_url})
    await mesh.learner(front)
    generator = await mesh.generator(front)
    call = buffer_pb2_grpc.BufferStub(generator.channel).Admit()
    me = {"member_id": generator.agent.member_id, "generation": generator.agent.generation}
    await call.write(pb.AdmitRequest(table="train", serving=V0.to_proto(), **me))
    questions = 0
    with pytest.raises(grpc.aio.AioRpcError, match="what it holds"):
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                questions += (await call.read()).inventory_within_ms == 1000 * lease_s
    assert questions >= 2


class OtherFront(buffer_pb2_grpc.BufferServicer):
    """Says one thing, and then nothing more, on connections that stand."""

    def __init__(self, *said: pb.AdmitResponse) -> None:
        self.said = said
        self.opened: asyncio.Queue[pb.AdmitRequest] = asyncio.Queue()

    async def Admit(self, requests: Any, _context: Any) -> Any:
        self.opened.put_nowait(await anext(aiter(requests)))
        for response in self.said:
            yield response
        await asyncio.Event().wait()


class HangingWrites(buffer_pb2_grpc.BufferServicer):
    """Takes a write on a connection that stands, and answers on the next one alone."""

    def __init__(self) -> None:
        self.opened: asyncio.Queue[pb.WriteRequest] = asyncio.Queue()
        self.calls = 0

    async def Write(self, requests: Any, _context: Any) -> Any:
        request = await anext(aiter(requests))
        self.opened.put_nowait(request)
        self.calls += 1
        if self.calls == 1:
            await asyncio.Event().wait()
        yield pb.WriteResponse(sequence=request.sequence, statuses=[pb.WRITE_STATUS_STORED])
        await asyncio.Event().wait()


@asynccontextmanager
async def served(front: buffer_pb2_grpc.BufferServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    buffer_pb2_grpc.add_BufferServicer_to_server(front, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def admitted_by(front: OtherFront, *, retry_s: float) -> AsyncIterator[AdmitStream]:
    async with served(front) as address:
        generator = Actor(address, "generator")
        generator.client._retry_s = retry_s
        stream = generator.client.admit("train", "me", 1)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield stream
        finally:
            await stream.close()
            await generator.close()


@pytest.mark.parametrize(
    ("said", "retry_s"),
    [
        ((pb.AdmitResponse(inventory_within_ms=200),), 5.0),
        ((pb.AdmitResponse(inventory_within_ms=400),), 0.2),
        ((), 0.2),
    ],
    ids=["a lease term", "a lease term that is longer than retries last", "nothing was ever said"],
)
async def test_who_is_not_asked_for_a_lease_term_opens_the_stream_again(
    said: tuple[pb.AdmitResponse, ...], retry_s: float
) -> None:
    front = OtherFront(*said)
    async with admitted_by(front, retry_s=retry_s):
        for _ in range(3):
            assert (await front.opened.get()).HasField("inventory")


async def test_a_write_that_a_front_never_answers_is_sent_again() -> None:
    front = HangingWrites()
    async with served(front) as address:
        generator = Actor(address, "generator")
        generator.client._retry_s = 0.3
        writer = generator.client.writer("train", "me", 1)
        write = asyncio.create_task(
            writer.write([make_write(pb.GroupGrant(group_id="train-1", lease_id="a1"), 0, [V0])])
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                first, again = [await front.opened.get() for _ in range(2)]
                assert first.sequence == again.sequence
                (result,) = await write
            assert result.status == pb.WRITE_STATUS_STORED
        finally:
            await writer.close()
            await generator.close()


async def test_who_waits_for_a_stream_hears_of_a_fault_that_ends_it() -> None:
    def fault(_leases: Any) -> None:
        raise ValueError("a fault of ours")

    async with admitted_by(OtherFront(pb.AdmitResponse(cancelled=[pb.LeaseRef()])), retry_s=5.0) as stream:
        stream.on_cancelled = fault
        with pytest.raises(RollmeshError, match="a fault of ours"):
            await anext(stream)
        with pytest.raises(RollmeshError, match="a fault of ours"):
            stream.update(1)
