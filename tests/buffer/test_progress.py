"""Changes that count as progress, leases by holder and time, and the state of the generators as a whole."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from rollmesh.buffer.monitoring.generator_fleet import GeneratorFleet, fleet_of
from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.wait import Wait
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2
from tests.buffer.mesh_fixture import LEASE_S, TIMEOUT_S, Learner, Mesh, make_write, refs

V0 = PolicyVersion(1, 0)


def _draft(grant: pb.GroupGrant, tokens: int) -> pb.MemberWrite:
    write = make_write(grant, 1, [V0] * tokens)
    write.head.draft = True
    return write


async def _moved(learner: Learner) -> int:
    described = await learner.client.describe("train")
    assert described.unmoved_ms < 60_000
    return described.moved_unix_ms


async def test_progress_is_what_cannot_be_undone_and_done_again_for_ever(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, first, second = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    begun = await _moved(learner)
    assert begun, "a takeover is the first progress of a run"
    await learner.seed(1, 1)
    for generator in (first, second):
        admission = generator.admission()
        admission.update(1, V0)
        (grant,) = await generator.grants(admission, 1)
        me = generator.agent
        await generator.client.release("train", me.member_id, me.generation, refs([grant]))
    admission = first.admission()
    admission.update(1, V0)
    (grant,) = await first.grants(admission, 1)
    assert grant.attempt == 3
    assert await _moved(learner) == begun, "neither seeding, nor grants that are released and granted again for ever"
    writer = first.writer()
    stamps = [begun]
    for write in (_draft(grant, 5), _draft(grant, 9), make_write(grant, 0, [V0])):
        await writer.write([write])
        stamps.append(await _moved(learner))
    assert stamps == sorted(set(stamps)), "a draft, a longer one, and a finished member"
    await writer.write([_draft(grant, 5)])
    await writer.write([make_write(grant, 0, [V0])])
    assert await _moved(learner) == stamps[-1], "what is there already is none"


async def test_holders_are_named_with_what_they_have_held_longest_first(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, slow, quick = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    await learner.seed(1, 4)
    slow.agent.set_status(wait=Wait("its tools do not answer"))
    await slow.agent.heartbeat()
    stream = slow.admission()
    stream.update(2, V0)
    held = await slow.grants(stream, 2)
    stream, writer = quick.admission(), quick.writer()
    stream.update(2, V0)
    await quick.finish(writer, await quick.grants(stream, 2), V0)
    leased = await learner.batch(learner.sampler(), 1, 0)
    answer = await learner.client.holders("train")
    assert [(h.member_id, h.role, h.groups, h.oldest_group_id) for h in answer.holders] == [
        (slow.agent.member_id, "generator", 2, held[0].group_id),
        (learner.agent.member_id, "learner", 1, leased[0].group_id),
    ]
    first, second = answer.holders
    assert first.held_ms >= second.held_ms
    assert (first.stream_open, first.waiting_reason) == (True, "its tools do not answer")
    assert first.address
    assert 0 < first.lease_ms <= 1000 * LEASE_S
    assert first.heartbeat_age_ms < 60_000
    shortened = await learner.client.holders("train", limit=1)
    assert (len(shortened.holders), shortened.total) == (1, 2)


async def test_the_word_of_a_member_that_went_silent_is_marked(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    stream = generator.admission()
    stream.update(1, V0)
    await generator.grants(stream, 1)
    generator.agent.set_status(wait=Wait("waits until 36 members are scored and stored"))
    await generator.agent.heartbeat()
    await generator.agent.stop()
    member_id = generator.agent.member_id

    async def said(age_ms: int) -> tuple[str, str]:
        await front.access.client.zadd(Keys(front.run_name).heartbeats, {member_id: int(time.time() * 1000) - age_ms})
        (member,) = await learner.agent.members(membership_pb2.ROLE_GENERATOR)
        (holder,) = (await learner.client.holders("train")).holders
        return member.waiting_reason, holder.waiting_reason

    fresh, old = await said(0), await said(round(750 * LEASE_S))
    assert set(fresh) == {"waits until 36 members are scored and stored"}
    for text in old:
        assert re.fullmatch(r"silent for \d+ s \(was: waits until 36 members are scored and stored\)", text)


def test_a_generator_loads_until_it_reports_gauges_and_serves_once_it_has_weights() -> None:
    def generator(incarnation: int, **gauges: float) -> membership_pb2.Member:
        member = membership_pb2.Member(role=membership_pb2.ROLE_GENERATOR, gauges=gauges)
        member.serving.incarnation = incarnation
        return member

    loading, waiting = generator(0), generator(0, tokens_generated=0)
    serving = generator(1, tokens_generated=90, tokens_for_groups=70)
    loading.waiting_reason = "loads the model"
    learner = membership_pb2.Member(role=membership_pb2.ROLE_LEARNER)
    assert fleet_of([learner, loading, waiting, serving, serving]) == GeneratorFleet(4, 2, 1, 140, "loads the model")


_IMPOSSIBLE = {float("nan"): 0, float("inf"): 0, -float("inf"): 0, -1.0: 0, 1e30: 2**63 - 1}


@pytest.mark.parametrize(("gauge", "tokens"), _IMPOSSIBLE.items())
def test_an_impossible_gauge_counts_as_far_as_it_can(gauge: float, tokens: int) -> None:
    member = membership_pb2.Member(role=membership_pb2.ROLE_GENERATOR, gauges={"tokens_for_groups": gauge})
    assert fleet_of([member]).tokens == tokens


async def test_stored_gauges_that_cannot_be_end_neither_a_front_nor_a_description(mesh: Mesh) -> None:
    """Every front reads the heartbeats of all members, again and again: one must not end them all."""
    front = await mesh.front()
    learner = await mesh.learner(front)
    for gauge in _IMPOSSIBLE:
        generator = await mesh.generator(front)
        await generator.agent.stop()
        beat = membership_pb2.HeartbeatRequest(gauges={"tokens_for_groups": gauge}, serving=V0.to_proto())
        status = f"{Keys(front.run_name).run}:status"
        await front.access.client.hset(status, generator.agent.member_id, beat.SerializeToString())
    async with asyncio.timeout(TIMEOUT_S):
        while (described := await learner.client.describe("train")).generators_serving < len(_IMPOSSIBLE):
            await asyncio.sleep(0.02)
    assert described.sampled_tokens == 2**63 - 1
