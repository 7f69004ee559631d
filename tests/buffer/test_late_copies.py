"""Copies of calls that arrive late, over a slow connection: the client has gone on, and they change nothing."""

from __future__ import annotations

import pytest

from mesh.errors import PayloadError, TakeoverRefusedError
from mesh.versions import PolicyVersion
from protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import Learner, Mesh, make_config, make_task, refs

V0 = PolicyVersion(1, 0)


async def test_a_late_copy_of_a_takeover_fences_nobody(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner, elsewhere = await mesh.learner(left), Learner(right.address, "learner")
    mesh.adopt(elsewhere)
    me = learner.agent.member_id
    first = pb.ResumeRequest(table="train", member_id=me, resume_version=0, nonce=(1 << 52))
    given = await learner.client._stub.Resume(first)
    await learner.client.seed("train", given.incarnation, [make_task(1)])
    assert await elsewhere.client._stub.Resume(first) == given
    assert (await learner.client.describe("train")).policy.incarnation == given.incarnation
    second = pb.ResumeRequest(table="train", member_id=me, resume_version=0, nonce=(1 << 52) + 1)
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
    with pytest.raises(PayloadError, match="one group at least"):
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
