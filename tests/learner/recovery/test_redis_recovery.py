"""The assertion of a learner after Redis has lost state: from the log, and for its predecessor from what is on disk."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.learner.recovery.consumption_log import ConsumptionLog, StepUse, UsedGroup
from rollmesh.learner.recovery.redis_recovery import RedisRecovery, assert_history, read_history
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.errors import DataError, FencedError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.conftest import redis_url  # noqa: F401  a fixture
from tests.buffer.mesh_fixture import Generator, Learner, Mesh, make_config
from tests.buffer.test_flow import balanced
from tests.buffer.test_redis_loss import RULES, Run, Snapshot


@pytest.fixture
async def mesh(redis_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:  # noqa: F811
    owner = Mesh(redis_url, tmp_path)
    yield owner
    await owner.close()


def write_log(folder: Path, uses: list[tuple[int, int, int, list[str]]]) -> None:
    """Lines of (incarnation, version, resumed at, groups)."""
    log = ConsumptionLog(folder / "consumption.jsonl")
    for incarnation, version, resumed_at, groups in uses:
        entries = [UsedGroup(gid, [0, 1], int(gid.rpartition("-")[2]), 1) for gid in groups]
        log.append(StepUse(incarnation, version, resumed_at, 0, entries))
    log.close()


def write_checkpoint(folder: Path, incarnation: int, version: int, lineage: list[list[int]]) -> Path:
    path = folder / "checkpoints" / f"i{incarnation:04d}-v{version:08d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"extra": {"lineage": lineage}}))
    return path


def test_a_new_run_has_left_nothing(tmp_path: Path) -> None:
    assert read_history(tmp_path) is None


def test_what_is_left_is_the_surviving_lineage_and_its_newest_checkpoint(tmp_path: Path) -> None:
    write_log(
        tmp_path,
        [(1, 0, 0, ["train-1"]), (1, 1, 0, ["train-2"]), (1, 2, 0, ["train-3"]), (2, 1, 1, ["train-2"])],
    )
    kept = write_checkpoint(tmp_path, 1, 1, [[1, 0]])
    write_checkpoint(tmp_path, 1, 2, [[1, 0]])  # of a learner that had been replaced: not on the lineage
    left = read_history(tmp_path)
    assert left is not None
    assert (left.incarnation, dict(left.takeovers)) == (2, {1: 0, 2: 1})
    assert (left.version, left.committed, left.checkpoint) == (2, 1, str(kept.resolve()))
    assert [use.groups[0].group_id for use in left.uses] == ["train-1", "train-2"]
    found = {(1, 1): True, (1, 2): False, (2, 2): True}
    assert {name: left.survives(PolicyVersion(*name)) for name in found} == found


def test_a_learner_that_used_nothing_is_known_by_its_checkpoint(tmp_path: Path) -> None:
    write_log(tmp_path, [(1, 0, 0, ["train-1"])])
    write_checkpoint(tmp_path, 3, 1, [[1, 0], [3, 1]])
    left = read_history(tmp_path)
    assert left is not None
    assert (left.incarnation, dict(left.takeovers)) == (3, {1: 0, 3: 1})


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, 1, 1, []) / "state.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        read_history(tmp_path)


async def test_a_step_is_never_interrupted_by_an_assertion_and_is_repeated_after_it(mesh: Mesh) -> None:
    front = await mesh.front(make_config(mesh.folder, mesh.redis_url, buffer={**RULES, "redis": mesh.redis_url}))
    run = Run(await mesh.learner(front), await mesh.generator(front))
    learner, log = run.learner, mesh.folder / "consumption.jsonl"
    await learner.seed(1, 40)
    await run.step()
    write_log(mesh.folder, [(1, 0, 0, run.trained)])
    status = LearnerStatus()
    recovery = RedisRecovery(
        learner.client, member_id=learner.agent.member_id, log=log, incarnation=1, takeovers={1: 0}, status=status,
        patience_s=10,
    )  # fmt: skip
    seen: list[str] = []
    recovery.on_recovered = lambda known: seen.append(f"told {known.seeded}")
    await front.access.client.hset(f"{{rollmesh:{front.run_name}}}", "suspect", "1")

    async def step() -> pb.CommitResponse:
        seen.append("begins")
        response = await learner.client._call(
            learner.client._stub.Commit, pb.CommitRequest(table="train", incarnation=1, version=1), "a step"
        )
        seen.append("ends")
        return response

    assert (await recovery.with_recovery(step)).trained == 2
    assert seen == ["begins", "told 40", "begins", "ends"]

    # Another assertion waits for the end of a step, and those who want one share it.
    going_on, gate = asyncio.Event(), asyncio.Event()

    async def long_step() -> None:
        going_on.set()
        await gate.wait()
        seen.append("long step ends")

    stepping = asyncio.create_task(recovery.with_recovery(long_step))
    await going_on.wait()
    repairs = [asyncio.create_task(recovery.repair()) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(stepping, *repairs)
    assert seen[4:] == ["long step ends", "told 40"]


async def test_a_successor_speaks_for_a_learner_whose_takeover_is_lost(mesh: Mesh, tmp_path: Path) -> None:
    front = await mesh.front(make_config(mesh.folder, mesh.redis_url, buffer={**RULES, "redis": mesh.redis_url}))
    run = Run(await mesh.learner(front), await mesh.generator(front))
    await run.learner.seed(1, 40)
    await run.step()
    snapshot = Snapshot(front)
    await snapshot.take()
    await run.step()
    await run.learner.kill()
    lost = Run(await mesh.learner(front, 1, takeover=True), run.generator)
    lost.admission, lost.writer = run.admission, run.writer
    await lost.step()
    await lost.learner.kill()
    write_log(tmp_path, [(1, 0, 0, run.trained[:2]), (1, 1, 0, run.trained[2:]), (2, 1, 1, lost.trained)])
    await snapshot.restore()
    left = read_history(tmp_path)
    assert left is not None
    next_one = Learner(front.address, "learner", mesh.log)
    mesh.adopt(next_one)
    await next_one.agent.start()
    for uses in ([], left.uses[:1]):
        cut = dataclasses.replace(left, committed=2, uses=uses)
        with pytest.raises(DataError, match="lacks step 2"):
            await assert_history(next_one.client, next_one.agent.member_id, cut, patience_s=10)
    await assert_history(next_one.client, next_one.agent.member_id, left, patience_s=10)
    description = await next_one.client.describe("train")
    assert (description.policy.incarnation, description.policy.version) == (2, 2)
    response = await next_one.client.resume("train", next_one.agent.member_id, 2)
    assert response.incarnation == 3
    await next_one.client.commit("train", 3, 2)
    assert (await balanced(next_one)).trained == 4, "those of the log that survive, no others"
    with pytest.raises(FencedError):
        await lost_again(lost, front.address)


async def lost_again(lost: Run, address: str) -> None:
    """The learner that was spoken for comes back from the dead."""
    zombie = Generator(address, "generator")
    try:
        await zombie.client.commit("train", lost.learner.incarnation, 2)
    finally:
        await zombie.close()
