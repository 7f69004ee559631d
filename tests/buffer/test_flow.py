"""The promises, over real gRPC and a real Redis: the life of groups from seed to commit."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from rollmesh.buffer.server import background_tasks
from rollmesh.mesh.errors import ConfigError, FencedError, PayloadError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import (
    LEASE_S,
    TIMEOUT_S,
    Learner,
    Mesh,
    key_of,
    make_config,
    make_failure,
    make_task,
    make_write,
    nothing_within,
    refs,
)
from tests.buffer.packed import read_counter, set_counter
from tests.buffer.redis_cluster import single_and_cluster
from tests.traced import KeptSpans

V0 = PolicyVersion(1, 0)
V1 = PolicyVersion(1, 1)


async def balanced(learner: Learner, table: str = "train") -> pb.LedgerCounts:
    """The ledger's counters, after they agreed with the recount."""
    ledger = await learner.client.ledger(table, 10)
    assert list(ledger.discrepancies) == []
    return ledger.counters


@single_and_cluster
async def test_a_group_lives_from_seed_to_commit_and_its_bytes_stay_the_same(mesh: Mesh) -> None:
    _, learner, generator, _, grants = await mesh.granted(2)
    writer, sampler = generator.writer(), learner.sampler()
    assert [g.task.ordinal for g in grants] == [1, 2]
    assert grants[0].lease_term_ms == 1000 * LEASE_S
    written = {(g.group_id, m): make_write(g, m, [V0] * (3 + m)) for g in grants for m in range(2)}
    results = await writer.write(list(written.values()))
    assert [r.status for r in results] == [pb.WRITE_STATUS_STORED] * 4
    assert [r.sealed for r in results] == [False, True, False, True]

    groups = await learner.batch(sampler, 2, 0)
    assert [g.group_id for g in groups] == [g.group_id for g in grants]
    for group in groups:
        assert group.task == make_task(group.task.ordinal)
        for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
            assert meta == written[(group.group_id, meta.member)].head.meta
            assert payload == written[(group.group_id, meta.member)].payload
    members = [pb.MemberRef(group_id=g.group_id, member=m) for g in groups for m in (1, 0)]
    fetched = [payload async for payload in learner.client.fetch("train", members)]
    assert fetched == [written[(m.group_id, m.member)].payload for m in members]

    assert (await learner.train(groups, 0)).claimed
    assert (await balanced(learner)).consumed == 2
    assert (await learner.client.commit("train", 1, 1, "ckpt")).trained == 2
    counts = await balanced(learner)
    assert (counts.admitted, counts.trained, counts.seeded_tasks) == (2, 2, 2)
    description = await learner.client.describe("train")
    assert (description.latest_checkpoint, description.committed_version) == ("ckpt", 1)
    assert description.bytes == 0


async def test_a_metadata_only_stream_leaves_payloads_to_fetch(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission, writer = generator.admission(), generator.writer()
    admission.update(1, V0)
    await generator.finish(writer, await generator.grants(admission, 1), V0)
    groups = await learner.batch(learner.sampler(with_payloads=False), 1, 0)
    assert not learner.payloads[groups[0].group_id]
    assert len(groups[0].members) == 2


async def test_repeated_and_malformed_writes_change_nothing(mesh: Mesh) -> None:
    _, learner, generator, _, (grant,) = await mesh.granted()
    writer = generator.writer()
    good, bad = make_write(grant, 0, [V0]), make_write(grant, 1, [V0])
    bad.head.meta.response_tokens = 5
    stored, rejected = await writer.write([good, bad])
    assert (stored.status, rejected.status) == (pb.WRITE_STATUS_STORED, pb.WRITE_STATUS_REJECTED)
    assert rejected.field == "meta.response_tokens"
    (no_member,) = await writer.write([make_write(grant, 7, [V0])])
    assert (no_member.status, no_member.field) == (pb.WRITE_STATUS_REJECTED, "meta.member")
    other = make_write(grant, 0, [V0] * 9)
    assert (await writer.write([good, other]))[0].status == pb.WRITE_STATUS_DUPLICATE
    (sealed,) = await writer.write([make_write(grant, 1, [V0])])
    assert sealed.sealed
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert learner.payloads[group.group_id][0] == good.payload, "the first value wins"
    strange = pb.GroupGrant(group_id="train-99", lease_id="a99", attempt=1)
    (late,) = await writer.write([make_write(strange, 0, [V0])])
    assert late.status == pb.WRITE_STATUS_SUPERSEDED, "a write never creates a group"
    counts = await balanced(learner)
    assert (counts.duplicate_writes, counts.superseded_writes, counts.admitted) == (2, 1, 1)


async def test_what_another_generator_holds_cannot_be_guessed(mesh: Mesh) -> None:
    """Groups and leases are counted, and a stranger can count along; the rest of a lease's name is a secret."""
    front, _, holder, _, grants = await mesh.granted(2)
    other = await mesh.generator(front)
    counted = [(number, digest) for number, _, digest in (grant.lease_id.partition("-") for grant in grants)]
    assert [number for number, _ in counted] == ["a1", "a2"]
    assert all(len(digest) == 16 for _, digest in counted)
    assert counted[0][1] != counted[1][1]
    guessed = [
        pb.GroupGrant(group_id=grants[0].group_id, lease_id=lease, attempt=1)
        for lease in ("a1", "a1-", "a1-" + counted[1][1], "")
    ]
    outcomes = await other.writer().write([make_write(grant, 0, [V0]) for grant in guessed])
    assert {outcome.status for outcome in outcomes} <= {pb.WRITE_STATUS_SUPERSEDED, pb.WRITE_STATUS_REJECTED}
    (stored,) = await holder.writer().write([make_write(grants[0], 0, [V0])])
    assert stored.status == pb.WRITE_STATUS_STORED


async def test_the_gate_holds_the_bound_and_opens_with_the_version(mesh: Mesh) -> None:
    front = await mesh.front()  # B = 2, S = 1: at most 4 unclaimed groups for a generator that is up to date
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 10)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(9, V0)
    grants = await generator.grants(admission, 4)
    assert await nothing_within(anext(admission))
    description = await learner.client.describe("train")
    assert (description.counts.generating, description.next_train_version) == (4, 0)
    await generator.finish(writer, grants, V0)
    groups = await learner.batch(sampler, 2, 0)
    assert (await learner.train(groups, 0)).claimed
    assert await nothing_within(anext(admission)), "the claim frees a place, but the generator serves the old version"
    admission.update(9, V1)
    assert len(await generator.grants(admission, 2)) == 2
    assert await nothing_within(anext(admission))
    await balanced(learner)


@single_and_cluster
async def test_on_policy_never_hangs_when_groups_fail_or_are_filtered(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptSpans()
    monkeypatch.setattr("rollmesh.buffer.server.process.open_tracer", lambda *_, **__: kept.tracer)
    monkeypatch.setattr(kept.tracer, "close", lambda: None)
    front = await mesh.front(buffer={"max_staleness": 0, "redis": mesh.redis_url})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 12)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    for version in range(2):
        serving = PolicyVersion(1, version)
        admission.update(8, serving)
        first, second = await generator.grants(admission, 2)
        await writer.write([make_failure(first, 0), make_failure(first, 1)])
        (refill,) = await generator.grants(admission, 1)
        await generator.finish(writer, [second, refill], serving)
        groups = await learner.batch(sampler, 2, version)
        nacked = await learner.client.nack("train", 1, refs(groups[:1]), pb.NACK_DISPOSITION_FILTER, "zero_variance")
        assert nacked.changed == 1
        (again,) = await generator.grants(admission, 1)
        await generator.finish(writer, [again], serving)
        groups = groups[1:] + await learner.batch(sampler, 1, version)
        assert (await learner.train(groups, version)).claimed
    counts = await balanced(learner)
    assert (counts.failed, counts.filtered, counts.consumed) == (2, 2, 4)
    assert dict(counts.reasons) == {"failed/too_few_scored": 2, "filtered/zero_variance": 2}
    failed = (await learner.client.ledger("train", 5)).failed
    assert {(f.reason, f.attempts) for f in failed} == {("too_few_scored", 1)}
    ends = [span for span in kept.spans if span.name == "trajectory"]
    told = [(span.attributes["group"], span.attributes["member"], span.failure) for span in ends]
    assert told == [(f.group_id, member, "too_few_scored") for f in reversed(failed) for member in range(2)]


async def test_in_order_waits_for_the_straggler_whose_bound_is_near(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 6)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(9, V0)
    straggler, *quick = await generator.grants(admission, 4)
    await generator.finish(writer, quick[:2], V0)
    groups = await learner.batch(sampler, 2, 0)
    assert straggler.group_id not in {g.group_id for g in groups}, "version 1 still has room for it"
    assert (await learner.train(groups, 0)).claimed
    admission.update(9, V1)
    newer = await generator.grants(admission, 2)
    await generator.finish(writer, [*newer, quick[2]], V1)
    sampler.request(2, 1)
    first = await learner.collect(sampler, 1)
    assert await nothing_within(sampler.next(TIMEOUT_S)), "one slot is kept"
    async with asyncio.timeout(TIMEOUT_S):
        while "straggler" not in sampler.waiting_reason:
            await sampler.next(0.1)
    await generator.finish(writer, [straggler], V0)
    second = await learner.collect(sampler, 1)
    assert second[0].group_id == straggler.group_id
    assert (await learner.train(first + second, 1)).claimed
    counts = await balanced(learner)
    assert counts.evicted_stale == 0


async def test_fifo_evicts_stragglers_and_queues_their_prompts_again(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"max_staleness": 0, "redis": mesh.redis_url, "order": "fifo"})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 4, end_of_data=True)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(9, V0)
    straggler, quick = await generator.grants(admission, 2)
    await generator.finish(writer, [quick], V0)
    groups = await learner.batch(sampler, 1, 0)
    assert (await learner.train(groups, 0)).claimed, "a short batch is a batch"
    admission.update(9, V1)
    refill, _ = await generator.grants(admission, 2)
    assert (refill.parent_group_id, refill.task.ordinal) == (straggler.group_id, straggler.task.ordinal)
    (late,) = await writer.write([make_write(straggler, 0, [V0])])
    assert late.status == pb.WRITE_STATUS_SUPERSEDED
    counts = await balanced(learner)
    assert (counts.evicted_stale, counts.reasons["evicted_stale/hopeless"]) == (1, 1)


async def test_a_claim_is_all_or_none_and_once_per_version(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 4)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(4, V0)
    await generator.finish(writer, await generator.grants(admission, 4), V0)
    groups = await learner.batch(sampler, 2, 0)
    wrong = refs(groups)
    wrong[1].lease_id = "s999"
    refused = await learner.client.claim("train", 1, 0, wrong)
    assert not refused.claimed
    assert [(r.group_id, r.reason) for r in refused.refused] == [(groups[1].group_id, "lease_lost")]
    assert (await balanced(learner)).leased == 2
    assert (await learner.train(groups, 0)).claimed
    assert (await learner.train(groups, 0)).claimed, "repeating is harmless"
    later = await learner.batch(sampler, 2, 1)
    again = await learner.client.claim("train", 1, 0, refs(later))
    assert {r.reason for r in again.refused} == {"version_claimed"}
    over = await learner.client.claim("train", 1, 2, refs(later))
    assert {r.reason for r in over.refused} == {"over_bound"}
    assert (await learner.train(later, 1)).claimed


async def test_the_end_of_the_data_closes_the_last_batch_short(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1, end_of_data=True)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(4, V0)
    await generator.finish(writer, await generator.grants(admission, 1), V0)
    groups = await learner.batch(sampler, 2, 0)
    assert len(groups) == 1
    sampler.request(1, 0)
    response = await sampler.next(TIMEOUT_S)
    assert response is not None
    assert response.exhausted


async def test_seeding_twice_is_harmless_and_withdrawn_tasks_are_counted(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(front)
    assert (await learner.seed(1, 3)).added == 3
    again = await learner.seed(1, 4)
    assert (again.added, again.seeded, again.pending) == (1, 4, 4)
    taken_back = await learner.client.seed("train", 1, [], withdraw_pending=True)
    assert (taken_back.withdrawn, taken_back.pending) == (4, 0)
    counts = await balanced(learner)
    assert (counts.seeded_tasks, counts.withdrawn) == (4, 4)


async def test_an_evaluation_round_goes_only_to_the_generator_that_serves_its_version(mesh: Mesh) -> None:
    front = await mesh.front()
    statistics = front.metrics.front.store.statistics
    assert (await statistics.read("train", kinds=(), now_s=0.0)).committed == 0, "no learner was here yet"
    learner, ahead, pinned = await mesh.learner(front), await mesh.generator(front), await mesh.generator(front)
    tasks = [make_task(o, n=1, pinned=V0) for o in (1, 2, 3)]
    await learner.client.seed("eval", 1, tasks, end_of_data=True)
    wrong, right, writer = ahead.admission("eval"), pinned.admission("eval"), pinned.writer("eval")
    wrong.update(8, V1)
    assert await nothing_within(anext(wrong))
    right.update(8, V0)
    grants = await pinned.grants(right, 3)
    await pinned.finish(writer, grants, V0)
    groups = await learner.batch(learner.sampler("eval"), 4, 0)
    assert len(groups) == 3
    assert (await learner.client.claim("eval", 1, 0, refs(groups))).claimed
    assert (await learner.client.commit("eval", 1, 1)).trained == 3
    await balanced(learner, "eval")
    assert (await learner.client.describe("train")).committed_version == 0, "its ledger is its own"


async def test_a_round_that_no_one_serves_is_withdrawn_whole(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.client.seed("eval", 1, [make_task(o, n=1, pinned=V0) for o in (1, 2, 3)])
    admission, writer = generator.admission("eval"), generator.writer("eval")
    admission.update(2, V0)
    grants = await generator.grants(admission, 2)
    await generator.finish(writer, grants[:1], V0)
    fresh = [make_task(o, n=1, pinned=V1) for o in (4, 5)]
    response = await learner.client.seed("eval", 1, fresh, withdraw_pending=True, end_of_data=True)
    assert (response.withdrawn, response.added) == (1, 2)
    (late,) = await generator.finish(writer, grants[1:], V0)
    assert late.status == pb.WRITE_STATUS_SUPERSEDED
    admission.update(4, V1)
    grants = await generator.grants(admission, 2)
    await generator.finish(writer, grants, V1)
    groups = await learner.batch(learner.sampler("eval"), 9, 1)
    assert {g.task.ordinal for g in groups} == {4, 5}
    counts = await balanced(learner, "eval")
    assert (counts.withdrawn, counts.reasons["failed/withdrawn"]) == (1, 2)


async def test_the_byte_budget_gates_admission_only(mesh: Mesh) -> None:
    # A group of two reserves 1280.
    front = await mesh.front(
        buffer={"max_bytes": 1500, "redis": mesh.redis_url},
        learner={"batch": {"groups": 1}},
        rollout={"n": 2, "max_response_tokens": 16},
    )
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 4)
    admission, writer = generator.admission(), generator.writer()
    admission.update(4, V0)
    (grant,) = await generator.grants(admission, 1)
    assert await nothing_within(anext(admission), 1.5)
    assert "byte budget" in admission.waiting_reason
    await writer.write([make_write(grant, m, [V0] * 200) for m in range(2)])
    groups = await learner.batch(learner.sampler(), 1, 0)
    await learner.train(groups, 0)
    await learner.client.commit("train", 1, 1)
    admission.update(4, V1)
    assert await generator.grants(admission, 1)


async def test_a_budget_that_cannot_hold_one_batch_is_refused_at_the_start(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match="cannot hold one batch: 2 groups of 2 responses"):
        await mesh.front(buffer={"max_bytes": 1500, "redis": mesh.redis_url})


@single_and_cluster
async def test_a_ready_group_without_its_payload_ends_as_failed(mesh: Mesh) -> None:
    # At another front: the front that stored it would have it in memory.
    config = make_config(mesh.folder, mesh.redis_url)
    front, other = await mesh.front(config), await mesh.front(config)
    learner, generator = await mesh.learner(other), await mesh.generator(front)
    await learner.seed(1, 2)
    admission, writer = generator.admission(), generator.writer()
    admission.update(2, V0)
    lost, kept = await generator.grants(admission, 2)
    await generator.finish(writer, [lost, kept], V0)
    key = key_of(front, make_write(lost, 0, [V0] * 5))
    assert await front.access.batch([("UNLINK", key)]) == [1]
    groups = await learner.batch(learner.sampler(), 1, 0)
    assert [g.group_id for g in groups] == [kept.group_id]
    counts = await balanced(learner)
    assert counts.reasons["failed/payload_lost"] == 1


@single_and_cluster
async def test_payloads_never_expire_and_ended_groups_leave_nothing(mesh: Mesh) -> None:
    front, learner, generator, _, (grant,) = await mesh.granted()
    writer = generator.writer()
    write = make_write(grant, 0, [V0])
    await writer.write([write])
    redis = front.access.client
    pattern = f"rollmesh:{front.run_name}:*"
    key = key_of(front, write)
    assert await redis.ttl(key) == -1, "a run may stand still for long"
    await writer.write([make_write(grant, 1, [V0])])
    assert await redis.ttl(key) == -1
    groups = await learner.batch(learner.sampler(), 1, 0)
    await learner.train(groups, 0)
    await learner.client.commit("train", 1, 1)
    async with asyncio.timeout(TIMEOUT_S):
        while [key async for key in front.access.scan(pattern)]:
            await asyncio.sleep(0.02)
    assert not await redis.smembers(f"{{rollmesh:{front.run_name}}}:train:trash")


async def test_tampering_with_a_counter_shows_in_the_ledger(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(front)
    await learner.seed(1, 3)
    await set_counter(front, "train", "pending", 1 + await read_counter(front, "train", "pending"))
    await set_counter(front, "train", "trained", 2 + await read_counter(front, "train", "trained"))
    found = (await learner.client.ledger("train")).discrepancies
    assert "pending: the counter says 4, the recount 3" in found
    assert any(line.startswith("trained") for line in found)
    assert any(line.startswith("admitted") for line in found)


async def test_bad_calls_are_refused_by_name(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(front)
    with pytest.raises(PayloadError, match="table"):
        await learner.client.describe("nonsense")
    broken = make_task(1)
    broken.prompt_ids = b"abc"
    with pytest.raises(PayloadError) as caught:
        await learner.client.seed("train", 1, [broken])
    assert caught.value.field == "tasks[0].prompt_ids"
    task = make_task(1, n=2)
    task.greedy = 2
    with pytest.raises(PayloadError) as caught:
        await learner.client.seed("train", 1, [task])
    assert caught.value.field == "tasks[0].greedy"
    with pytest.raises(FencedError):
        await learner.client.seed("train", 0, [make_task(1)])
    with pytest.raises(PayloadError, match="disposition"):
        await learner.client.nack("train", 1, [], pb.NACK_DISPOSITION_UNSPECIFIED)


async def test_waits_have_reasons_and_clocks(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    admission, sampler = generator.admission(), learner.sampler()
    admission.update(1, V0)
    sampler.request(1, 0)
    async with asyncio.timeout(TIMEOUT_S):
        while not ("1 generator alive" in sampler.waiting_reason and "no prompt" in admission.waiting_reason):
            await sampler.next(0.1)
        while True:
            description = await learner.client.describe("train")
            if description.waiting_for_inserts_ms and description.waiting_for_samples_ms:
                break
    assert description.learner_waits.startswith("waits for groups")
    assert description.generators_wait == "no prompt tasks are pending"


async def test_a_generator_that_decodes_does_not_wait(mesh: Mesh) -> None:
    """It has free slots, and is told why they stay so; the clock runs once its last response is sampled."""
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission = generator.admission()
    admission.update(2, V0)
    await generator.grants(admission, 1)
    admission.update(1, V0, outstanding=1)
    assert front.metrics is not None
    report_waits = partial(background_tasks._report_waits, front.metrics.front, "train")
    async with asyncio.timeout(TIMEOUT_S):
        while "no prompt" not in admission.waiting_reason:
            await asyncio.sleep(0.01)
        # It waits from its grant until its message of the response arrives.
        await report_waits()
        while (stopped := await learner.client.describe("train")).generators_wait:
            await report_waits()
        for _ in range(5):
            await asyncio.sleep(0.01)
            await report_waits()
            found = await learner.client.describe("train")
            assert (found.waiting_for_samples_ms, found.generators_wait) == (stopped.waiting_for_samples_ms, "")
        admission.update(2, V0, outstanding=0)
        while (await learner.client.describe("train")).waiting_for_samples_ms == stopped.waiting_for_samples_ms:
            await asyncio.sleep(0.01)
