"""Verification concurrently with the transfer: what is damaged ends it, however much is still to come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.generators.weights import verified_transfer
from rollmesh.generators.weights.transports import Received, Transfer
from rollmesh.generators.weights.transports.shm import SharedMemory
from rollmesh.generators.weights.verified_transfer import receive_verified
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.weights import BucketSet
from tests.generators.weights.transports.cases import CASES
from tests.generators.weights.transports.world import Arrivals, local_learner

CASE = next(case for case in CASES if case.name == "shm")
DEADLINE_S = 240.0


class Damaging(SharedMemory):
    """Brings buckets that are damaged, each after the one before was verified."""

    def __init__(self) -> None:
        super().__init__(host_id())
        self.brought: list[int] = []

    async def receive(self, fetch: Transfer, arrived: Callable[[memoryview, int], None]) -> Received:
        data = memoryview(bytearray(fetch.bucket_set.nbytes))
        for index in range(len(fetch.bucket_set.buckets)):
            self.brought.append(index)
            others = asyncio.all_tasks()
            arrived(data, index)
            await asyncio.wait(asyncio.all_tasks() - others)
        return Received(data)


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20], ids=["in threads", "inline"])
async def test_each_bucket_is_told_once_it_is_verified_where_anyone_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(verified_transfer, "_VERIFY_INLINE_BYTES", inline_bytes)
    async with local_learner(CASE, tmp_path) as learner, asyncio.timeout(DEADLINE_S):
        bucket_set = BucketSet.full(learner.publish(0))
        arrivals = Arrivals(bucket_set)
        received = await receive_verified(learner.receiver(), learner.fetch(bucket_set), arrivals)
        arrivals.check(Received(received.data))
        unheard = await receive_verified(learner.receiver(), learner.fetch(bucket_set))
        assert unheard.data == received.data


async def test_damage_ends_a_transfer_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_transfer, "_VERIFY_INLINE_BYTES", 0)
    async with local_learner(CASE, tmp_path) as learner, asyncio.timeout(DEADLINE_S):
        bucket_set = BucketSet.full(learner.publish(0))
        assert len(bucket_set.buckets) == 3
        transport = Damaging()
        with pytest.raises(WeightsError, match="bucket 0 of version 1:0 is damaged"):
            await receive_verified(transport, learner.fetch(bucket_set))
        assert transport.brought == [0, 1]
