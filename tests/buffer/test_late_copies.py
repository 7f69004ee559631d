"""Copies of calls that arrive late, over a slow connection: the client has continued, and they change nothing."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import cast

import grpc
import pytest

from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.access.proof import new_challenge
from rollmesh.mesh.errors import PayloadError, TakeoverRefusedError
from rollmesh.mesh.membership import PROTOCOL, MembershipAgent
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2
from tests.buffer.mesh_fixture import TIMEOUT_S, Learner, Mesh, make_config, make_task, refs

V0 = PolicyVersion(1, 0)


async def test_a_late_copy_of_a_takeover_fences_no_one(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner, elsewhere = await mesh.learner(left), Learner(right.address, "learner")
    mesh.adopt(elsewhere)
    me = learner.agent.member_id
    first = pb.ResumeRequest(table="train", member_id=me, resume_version=0, call=(1 << 52))
    given = await learner.client._stub.Resume(first)
    await learner.client.seed("train", given.incarnation, [make_task(1)])
    assert await elsewhere.client._stub.Resume(first) == given
    assert (await learner.client.describe("train")).policy.incarnation == given.incarnation
    second = pb.ResumeRequest(table="train", member_id=me, resume_version=0, call=(1 << 52) + 1)
    newest = await learner.client._stub.Resume(second)
    assert newest.incarnation == given.incarnation + 1
    with pytest.raises(TakeoverRefusedError, match="later attempt"):
        await elsewhere.client._call(elsewhere.client._stub.Resume, first, "resuming")
    await learner.client.seed("train", newest.incarnation, [make_task(2)])


async def test_a_late_withdrawal_leaves_the_next_round_alone(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(front)
    first = pb.SeedRequest(table="eval", incarnation=1, withdraw_pending=True, end_of_data=True, call=7)
    await learner.client._stub.Seed(first)
    await learner.client.seed("eval", 1, [make_task(1), make_task(2)], withdraw_pending=True)
    answer = await learner.client._stub.Seed(first)
    assert (answer.withdrawn, answer.pending) == (0, 2)
    assert not (await learner.client.describe("eval")).end_of_data


async def test_a_claim_of_more_than_was_claimed_uses_nothing_twice(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.client.seed("eval", 1, [make_task(1, pinned=V0), make_task(2, pinned=V0)])
    admission = generator.admission("eval")
    admission.update(2, V0)
    await generator.finish(generator.writer("eval"), await generator.grants(admission, 2), V0)
    leases = refs(await learner.batch(learner.sampler("eval"), 2, 0))
    assert (await learner.client.claim("eval", 1, 0, leases[:1])).claimed
    assert (await learner.client.claim("eval", 1, 0, leases)).claimed
    told = await learner.client.ledger("eval")
    assert (told.counters.consumed, told.counters.leased, told.counters.uses) == (2, 0, 2)
    assert not told.discrepancies


async def test_a_claim_of_nothing_or_of_a_later_version_moves_nothing(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 2)
    with pytest.raises(PayloadError, match="at least one group"):
        await learner.client.claim("train", 1, 1000, [])
    admission = generator.admission()
    admission.update(2, V0)
    await generator.finish(generator.writer(), await generator.grants(admission, 2), V0)
    leases = refs(await learner.batch(learner.sampler(), 2, 0))
    ahead = await learner.client.claim("train", 1, 1, leases)
    assert {refusal.reason for refusal in ahead.refused} == {"version_ahead"}
    assert (await learner.client.describe("train")).next_train_version == 0
    assert (await learner.client.claim("train", 1, 0, leases)).claimed


async def test_what_verbs_read_of_a_run_does_not_grow_with_its_takeovers(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(front)
    key = f"{{rollmesh:{front.run_name}}}"
    fields = set(await front.access.client.hkeys(key))
    for _ in range(3):
        await learner.take_over(0)
    assert set(await front.access.client.hkeys(key)) == fields
    assert await front.access.client.hlen(f"{key}:takeovers") == 4


async def test_a_late_join_ends_no_ones_connection(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    agent = generator.agent
    first = membership_pb2.JoinRequest()
    first.CopyFrom(agent._join_request)
    assert (await agent._stub.Join(first)).generation == agent.generation
    await agent._join(TIMEOUT_S)
    assert (await agent._stub.Join(first)).generation == agent.generation, "the one in force"
    await learner.seed(1, 1)
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    await generator.finish(generator.writer(), [grant], V0)


async def test_what_is_said_late_of_one_loss_does_not_end_the_doubt_of_the_next(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(front)
    redis, run = front.access.client, Keys(front.run_name).run
    me, takeovers = learner.agent.member_id, [pb.Takeover(incarnation=1, resumed_at=0)]

    def said(doubt: int) -> Awaitable[pb.ReassertResponse]:
        request = pb.ReassertRequest(table="train", incarnation=1, member_id=me, takeovers=takeovers, doubt=doubt)
        return cast("Awaitable[pb.ReassertResponse]", learner.client._stub.Reassert(request))

    assert (await said(0)).doubt == 0
    numbers = []
    for _ in range(2):
        await redis.hset(run, "redis_run_id", "another")
        numbers.append((await said(0)).doubt)
        if len(numbers) == 2:
            with pytest.raises(grpc.aio.AioRpcError, match="may have lost"):
                await said(numbers[0])
            assert (await said(0)).doubt == numbers[1], "it is still in doubt"
        assert (await said(numbers[-1])).doubt == numbers[-1]
    assert (await learner.seed(1, 1)).added == 1


async def test_a_late_redrive_of_all_queues_each_prompt_once(mesh: Mesh) -> None:
    """A group that has failed since is queued as well: its prompt is tried once more, and every book balances."""
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 2)
    admission = generator.admission()
    admission.update(1, V0)
    for failed in (1, 2):
        (grant,) = await generator.grants(admission, 1)
        await front.metrics.front.store.fail_groups("train", [(grant.group_id, grant.lease_id)])
        if failed == 1:
            assert (await learner.client.redrive("train")).redriven == 1
            admission.update(1, V0)
    assert [(await learner.client.redrive("train")).redriven for _ in range(2)] == [1, 0]
    assert not (await learner.client.ledger("train")).discrepancies


async def test_a_process_whose_clock_is_behind_joins_in_the_place_of_the_one_before(mesh: Mesh) -> None:
    front = await mesh.front()
    generator = await mesh.generator(front)
    member_id = generator.agent.member_id
    before = membership_pb2.JoinRequest(
        member_id=member_id,
        role=membership_pb2.ROLE_GENERATOR,
        address="127.0.0.1:1",
        host_id="test",
        protocol=PROTOCOL,
        call=(time.time_ns() // 1000) + 3_600_000_000,
        challenge=new_challenge(),
    )
    given = await generator.membership.Join(before)
    agent = MembershipAgent(
        generator.channel,
        membership_pb2.ROLE_GENERATOR,
        member_id=member_id,
        address="127.0.0.1:2",
        host_id="test",
        retry_s=TIMEOUT_S,
    )
    await agent.start()
    assert agent.generation > given.generation
    members = (await generator.membership.List(membership_pb2.ListRequest())).members
    assert [member.address for member in members if member.member_id == member_id] == ["127.0.0.1:2"]
    # A copy of the earlier join still changes nothing.
    assert (await generator.membership.Join(before)).generation == agent.generation
    await agent.leave()
