"""The learner's groups, through all that can happen to its leases: batches come together and are claimed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from rollmesh.buffer.client.client import AdmitStream, Lease, WriteStream
from rollmesh.buffer.server import sample_session
from rollmesh.buffer.server.process import BufferFront
from rollmesh.learner.algorithms.types import Group
from rollmesh.learner.coordinator.batch_claim import BatchClaimer, CandidateBatch, ClaimRules
from rollmesh.learner.coordinator.train_table import TrainTable
from rollmesh.learner.distributed.trajectories import FetchedTrajectories
from rollmesh.learner.recovery.consumption_log import ConsumptionLog, read_log
from rollmesh.learner.rollouts.group_stream import UNREADABLE, GroupStream
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import DataError, PayloadError, RollmeshError
from rollmesh.mesh.trajectory.payload_codec import Trajectory, decode, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.conftest import redis_url  # noqa: F401  a fixture
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Learner, Mesh, make_config, make_write
from tests.buffer.test_flow import balanced
from tests.learner.dataflow import Plain, make_plan

V0 = PolicyVersion(1, 0)
B = 4
GRACE_S = 0.2


class Picky(Plain):
    """Drops groups by order of the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[str] = []

    def group_stage(self, group: Group) -> str | None:
        del group
        return self.verdicts.pop() if self.verdicts else None


class Here:
    """The bridge of a main thread to this loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def call(self, coroutine: Any, timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)


class Steady:
    """A Redis that loses nothing, and prompts that need no refill."""

    def batch_used(self) -> None:
        pass

    async def with_recovery(self, step: Callable[[], Awaitable[Any]]) -> Any:
        return await step()


class Training:
    """The learner's source and claimer at a front, and a generator."""

    def __init__(self, mesh: Mesh, config: Config) -> None:
        self.mesh = mesh
        self.config = config
        self.algorithm = Picky()
        self.front: BufferFront
        self.learner: Learner
        self.generator: Generator
        self.admission: AdmitStream
        self.writer: WriteStream

    async def start(self, *, with_payloads: bool) -> None:
        self.front = await self.mesh.front(self.config)
        self.learner, self.generator = await self.mesh.learner(self.front), await self.mesh.generator(self.front)
        await self.learner.seed(1, 6 * B)
        self.admission, self.writer = self.generator.admission(), self.generator.writer()
        self.source = GroupStream(self.learner.client, 1, with_payloads=with_payloads)
        self.source.start()
        self.log = ConsumptionLog(self.mesh.folder / "log")
        self.claimer = BatchClaimer(
            Here(),  # type: ignore[arg-type]
            TrainTable(self.learner.client, self.source, seeder=cast(Any, Steady()), recovery=cast(Any, Steady())),
            self.algorithm,
            self.log,
            cast(Any, None),
            ClaimRules(incarnation=1, resumed_at=0, groups=B, last_version=1 << 30),
        )

    async def close(self) -> None:
        await self.source.close()
        self.log.close()

    async def finish(self, count: int, version: int = 0) -> None:
        serving = PolicyVersion(1, version)
        self.admission.update(count, serving)
        await self.generator.finish(self.writer, await self.generator.grants(self.admission, count), serving)

    async def counts(self, **wanted: int) -> pb.LedgerCounts:
        """Waits until the ledger says so."""
        async with asyncio.timeout(TIMEOUT_S):
            counts = await balanced(self.learner)
            while {name: getattr(counts, name) for name in wanted} != wanted:
                await asyncio.sleep(0.02)
                counts = await balanced(self.learner)
        return counts

    async def away(self, seconds: float) -> None:
        """The front is away, and all the others live."""
        port = int(self.front.address.rsplit(":", 1)[1])
        await self.mesh.stop_front(self.front)
        await asyncio.sleep(seconds)
        self.front = await self.mesh.front(self.config, port=port)

    async def gather(self, candidate: CandidateBatch) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            assert await asyncio.to_thread(self.claimer.gather, candidate, TIMEOUT_S)
        assert len({group.group_id for group in candidate.groups}) == len(candidate.groups) == B

    async def publish(self, version: int) -> None:
        await self.learner.client.set_policy_version(1, version)

    async def release(self, leases: list[Lease]) -> None:
        """Ends leases without the learner's knowledge."""
        refs = [pb.LeaseRef(group_id=group_id, lease_id=lease) for group_id, lease in leases]
        await self.learner.client.nack("train", 1, refs, disposition=pb.NACK_DISPOSITION_RELEASE)


@pytest.fixture(params=[True, False], ids=["one rank", "many ranks"])
async def training(
    request: pytest.FixtureRequest,
    redis_url: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Training]:
    # The front asks the learner for what it holds as often.
    monkeypatch.setattr(sample_session, "_RECHECK_S", 0.1)
    owner = Mesh(redis_url, tmp_path)
    config = make_config(
        tmp_path,
        redis_url,
        learner={"batch": {"groups": B}},
        buffer={"max_staleness": 1, "redis": redis_url, "lease_s": 6.0, "reconnect_grace_s": GRACE_S},
    )
    training = Training(owner, config)
    try:
        await training.start(with_payloads=request.param)
        yield training
        await training.close()
    finally:
        await owner.close()


async def test_a_learner_that_was_away_beyond_the_grace_with_part_of_a_batch_trains_on(training: Training) -> None:
    gathering = asyncio.create_task(training.gather(candidate := CandidateBatch(0)))
    await training.finish(B - 1)
    await training.counts(leased=B - 1)
    await training.away(2 * GRACE_S)
    await training.finish(B + 1)
    await gathering
    if not await training.claimer.claim(candidate):
        await training.gather(candidate)
        assert await training.claimer.claim(candidate)
    await training.publish(1)
    await training.gather(after := CandidateBatch(1))
    assert await training.claimer.claim(after)
    uses = [group.group_id for use in read_log(training.mesh.folder / "log") for group in use.groups]
    assert len(set(uses)) == len(uses) == 2 * B
    await training.counts(consumed=2 * B, leased=0, ready=0)


async def test_leases_that_are_lost_under_a_candidate_are_replaced_one_by_one(training: Training) -> None:
    await training.finish(2 * B)
    await training.gather(candidate := CandidateBatch(0))
    gone = [group.key for group in candidate.groups[:2]]
    await training.release(gone)
    assert not await training.claimer.claim(candidate)
    assert candidate.dropped == {"lease_lost": 2}
    kept = candidate.groups[2:]
    await training.gather(candidate)
    assert candidate.groups[: B - 2] == kept, "living leases stay"
    assert await training.claimer.claim(candidate)
    await training.counts(consumed=B)


async def test_the_learner_hears_of_lost_leases_before_it_trains_on_them(training: Training) -> None:
    await training.finish(2 * B)
    await training.gather(candidate := CandidateBatch(0))
    await training.release([group.key for group in candidate.groups])
    # The next question asks for what it holds; none of it is alive.
    async with asyncio.timeout(TIMEOUT_S):
        while set(candidate.groups) & set(await training.source.next_batch(0, B, TIMEOUT_S)):
            await asyncio.sleep(0.02)
    await training.gather(candidate)
    assert await training.claimer.claim(candidate)
    assert not candidate.dropped


async def test_what_a_claim_leaves_over_is_given_back(training: Training) -> None:
    await training.finish(2 * B)
    await training.gather(candidate := CandidateBatch(0))
    candidate.groups.pop()
    assert await training.claimer.claim(candidate)
    # Either the spare group is leased for the next version, or one that was ready before.
    await training.counts(consumed=B - 1, leased=B, ready=1)


async def test_prefetched_groups_that_are_lost_are_asked_for_again(training: Training) -> None:
    await training.finish(2 * B)
    await training.gather(candidate := CandidateBatch(0))
    assert await training.claimer.claim(candidate)
    await training.counts(leased=B)
    await training.away(2 * GRACE_S)
    await training.publish(1)
    await training.gather(after := CandidateBatch(1))
    if not await training.claimer.claim(after):
        await training.gather(after)
        assert await training.claimer.claim(after)
    await training.counts(consumed=2 * B, leased=0)


async def test_dropped_groups_are_replaced_by_as_many(training: Training) -> None:
    training.algorithm.verdicts = ["dull", "dull"]
    await training.finish(2 * B)
    await training.gather(candidate := CandidateBatch(0))
    assert candidate.dropped == {"dull": 2}
    assert await training.claimer.claim(candidate)
    await training.counts(consumed=B, filtered=2)


async def test_groups_that_cannot_be_trained_fail_and_others_take_their_place(training: Training) -> None:
    await training.finish(2 * B)
    await training.gather(candidate := CandidateBatch(0))
    unusable = {group.group_id: "damaged" for group in candidate.groups[:2]}
    await asyncio.to_thread(training.claimer.discard, candidate, unusable)
    assert candidate.dropped == {UNREADABLE: 2}
    await training.gather(candidate)
    assert not unusable.keys() & {group.group_id for group in candidate.groups}
    assert await training.claimer.claim(candidate)
    await training.counts(consumed=B, failed=2)


@pytest.mark.parametrize("training", [False], ids=["many ranks"], indirect=True)
async def test_a_rank_hears_of_every_payload_that_is_gone_or_damaged(training: Training) -> None:
    serving = PolicyVersion(1, 0)
    training.admission.update(B, serving)
    grants = await training.generator.grants(training.admission, B)
    writes = [make_write(grant, member, [serving] * 5) for grant in grants for member in range(grant.task.n)]
    compressed = encode(decode(writes[2].payload), codec="zstd")
    # The front looks at the header alone.
    writes[2] = dataclasses.replace(writes[2], payload=compressed[:-4] + bytes(4))
    damaged = writes[2].head.group_id
    await training.writer.write(writes)
    await training.gather(candidate := CandidateBatch(0))
    plan = make_plan(candidate.groups)
    gone = next(group for group in candidate.groups if group.group_id != damaged)
    await training.learner.client.nack("train", 1, [gone.lease], disposition=pb.NACK_DISPOSITION_FAIL, reason="test")
    payloads = FetchedTrajectories(Here(), training.learner.client, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    found = await asyncio.to_thread(payloads.get, plan.members)
    kinds = {(member.group_id, member.member): type(what) for member, what in zip(plan.members, found, strict=True)}
    expected: dict[tuple[str, int], type] = dict.fromkeys(kinds, Trajectory)
    expected |= {name: DataError for name in kinds if name[0] == gone.group_id}
    expected[damaged, writes[2].head.meta.member] = PayloadError
    assert kinds == expected
    assert list(kinds.values()).count(DataError) == 2


async def test_a_fault_while_groups_are_taken_in_ends_the_wait_for_them(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr("rollmesh.learner.rollouts.group_stream.decode_group", fault)
    waiting = asyncio.create_task(training.source.next_batch(0, B, 2 * TIMEOUT_S))
    await training.finish(1)
    with pytest.raises(RollmeshError, match="a fault of ours"):
        async with asyncio.timeout(TIMEOUT_S):
            await waiting
