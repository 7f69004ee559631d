"""The contract of every transport, whatever moves the bytes: a suite to inherit from.

A subclass provides the fixture `case` (a `Case`; `cases.CASES` lists all) and may narrow nothing. Publisher and service
are real; tests wait for events with deadlines, none sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollmesh.generators.weights.verified_transfer import receive_verified
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights import BucketSet
from rollmesh.protos import weights_pb2
from tests.generators.weights.transports.world import Arrivals, Case, local_learner, remote_learner, tensors

DEADLINE_S = 240.0
# The silence after which a hung publisher is given up; the others may take as long as they need.
PATIENCE_S = 1.0


class TransportContract:
    """Inherit, and provide `case`."""

    @pytest.fixture
    def shared(self, tmp_path: Path) -> Path:
        """Stands in for /dev/shm."""
        folder = tmp_path / "shm"
        folder.mkdir()
        return folder

    async def test_every_bucket_arrives_once_and_whole(self, case: Case, shared: Path) -> None:
        async with local_learner(case, shared) as learner:
            receiver = learner.receiver()
            assert receiver.name == case.name
            for version in range(3):
                bucket_set = BucketSet.full(learner.publish(version))
                assert len(bucket_set.buckets) > 2
                assert receiver.refusal(bucket_set) == ""
                arrivals = Arrivals(bucket_set)
                received = await asyncio.wait_for(receiver.receive(learner.fetch(bucket_set), arrivals), DEADLINE_S)
                arrivals.check(received)

    async def test_several_receive_at_once(self, case: Case, shared: Path) -> None:
        async with local_learner(case, shared) as learner:
            bucket_set = BucketSet.full(learner.publish(0))
            all_arrivals = [Arrivals(bucket_set) for _ in range(case.at_once)]
            transfers = [learner.receiver().receive(learner.fetch(bucket_set), arrivals) for arrivals in all_arrivals]
            for arrivals, received in zip(
                all_arrivals, await asyncio.wait_for(asyncio.gather(*transfers), DEADLINE_S), strict=True
            ):
                arrivals.check(received)

    async def test_what_was_received_outlives_its_version(self, case: Case, shared: Path) -> None:
        async with local_learner(case, shared) as learner:
            bucket_set = BucketSet.full(learner.publish(0))
            arrivals = Arrivals(bucket_set)
            receiver = learner.receiver()
            received = await asyncio.wait_for(receiver.receive(learner.fetch(bucket_set), arrivals), DEADLINE_S)
            for version in range(1, 4):
                learner.publish(version)
            await receiver.close()
            arrivals.check(received)

    async def test_damage_is_found(self, case: Case, shared: Path) -> None:
        async with local_learner(case, shared) as learner:
            manifest = learner.publish(0)
            bucket_set = BucketSet.full(manifest)
            learner.damage(manifest, case.name)
            last = len(bucket_set.buckets) - 1
            with pytest.raises(WeightsError, match=f"bucket {last} of version 1:0 is damaged"):
                await asyncio.wait_for(receive_verified(learner.receiver(), learner.fetch(bucket_set)), DEADLINE_S)

    async def test_a_version_that_is_not_kept_fails_at_once(self, case: Case, shared: Path) -> None:
        async with local_learner(case, shared) as learner:
            bucket_set = BucketSet.full(learner.publish(0))
            for version in range(1, 4):
                learner.publish(version)
            with pytest.raises(WeightsError):
                transfer = learner.receiver().receive(learner.fetch(bucket_set, timeout_s=3600), Arrivals(bucket_set))
                await asyncio.wait_for(transfer, DEADLINE_S)

    async def test_cancelled_it_leaves_nothing_behind(self, case: Case, shared: Path) -> None:
        async with local_learner(case, shared) as learner:
            receiver = learner.receiver()
            # Files opened once and kept are not counted.
            first = BucketSet.full(learner.publish(0))
            await asyncio.wait_for(receiver.receive(learner.fetch(first), Arrivals(first)), DEADLINE_S)
            bucket_set = BucketSet.full(learner.publish(1, rows=5_000))
            before = _belongings(shared)
            arrivals = Arrivals(bucket_set)
            transfer = asyncio.create_task(receiver.receive(learner.fetch(bucket_set, member_id="one"), arrivals))
            arrivals.at_first(transfer.cancel)
            # A transport that is done with its last bucket is done in time.
            await asyncio.wait_for(asyncio.wait({transfer}), DEADLINE_S)
            assert transfer.cancelled() or len(arrivals.copies) == len(bucket_set.buckets)
            await _until(lambda: _belongings(shared) <= before)
            again = Arrivals(bucket_set)
            transfer = asyncio.create_task(receiver.receive(learner.fetch(bucket_set, member_id="one"), again))
            again.check(await asyncio.wait_for(transfer, DEADLINE_S))

    async def test_a_hung_publisher_and_then_a_killed_one(self, case: Case, shared: Path) -> None:
        async with remote_learner(case, shared) as learner:
            bucket_set = BucketSet.full(learner.manifest)
            learner.freeze()
            arrivals = Arrivals(bucket_set)
            silence_s = PATIENCE_S if case.needs_publisher else DEADLINE_S
            transfer = learner.receiver().receive(learner.fetch(bucket_set, timeout_s=silence_s), arrivals)
            if case.needs_publisher:
                with pytest.raises(WeightsError):
                    await asyncio.wait_for(transfer, DEADLINE_S)
            else:
                arrivals.check(await asyncio.wait_for(transfer, DEADLINE_S))
            learner.thaw()
            arrivals = Arrivals(bucket_set)
            killed: list[asyncio.Task[None]] = []
            arrivals.at_first(lambda: killed.append(asyncio.create_task(learner.kill())))
            transfer = learner.receiver().receive(learner.fetch(bucket_set, timeout_s=PATIENCE_S), arrivals)
            try:
                received = await asyncio.wait_for(transfer, DEADLINE_S)
            except WeightsError:
                assert len(arrivals.copies) < len(bucket_set.buckets)
            else:
                # All of it was on its way already.
                arrivals.check(received)
            assert killed
            await asyncio.gather(*killed)

    async def test_tensors_are_read_as_they_were_written(self, case: Case, shared: Path) -> None:
        import torch

        from rollmesh.mesh.weights.tensors import named_tensors

        async with local_learner(case, shared) as learner:
            manifest: weights_pb2.Manifest = learner.publish(5)
            verified = await receive_verified(learner.receiver(), learner.fetch(BucketSet.full(manifest)))
            found = dict(named_tensors(manifest, verified.data))
            expected = tensors(5)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            assert verified.transport == case.name


def _belongings(shared: Path) -> set[object]:
    """Tasks, files and child processes that exist now."""
    names = {path.name for path in shared.iterdir()}
    children = {process.pid for process in psutil.Process().children()}
    # The learner of the test lives in the same loop; its server always has one task that waits for the next call.
    tasks = {task for task in asyncio.all_tasks() if "AioServer" not in repr(task)}
    return {*tasks, *names, *children}


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)
