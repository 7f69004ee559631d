"""Files in shared memory that are gone, or are not what was said."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.generators.weights.transports import shm
from rollmesh.generators.weights.transports.shm import SharedMemory
from rollmesh.mesh.errors import VersionGoneError, WeightsError
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.weights import BucketSet
from rollmesh.protos import weights_pb2
from tests.generators.weights.transports.cases import CASES
from tests.generators.weights.transports.world import Arrivals, local_learner

CASE = next(case for case in CASES if case.name == "shm")


async def test_a_version_that_was_let_go_of_is_told_from_one_that_fails(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        bucket_set = BucketSet.full(learner.publish(0))
        for version in range(1, 4):
            learner.publish(version)
        with pytest.raises(VersionGoneError, match="is gone"):
            await learner.receiver().receive(learner.fetch(bucket_set), Arrivals(bucket_set))


async def test_other_tasks_run_between_buckets(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        bucket_set = BucketSet.full(learner.publish(0))
        run: list[int] = []

        def arrived(_data: memoryview, index: int) -> None:
            assert run == list(range(index))
            asyncio.get_running_loop().call_soon(run.append, index)

        await learner.receiver().receive(learner.fetch(bucket_set), arrived)
        assert len(run) == len(bucket_set.buckets) > 1


def _linked(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (os.mkfifo, "no file of our user"),
        (_linked, "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"short"), "has 5 bytes, "),
    ],
    ids=["pipe", "link", "short"],
)
async def test_what_lies_at_the_announced_path_is_looked_at(
    tmp_path: Path, put: Callable[[Path], object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Opened without care, a pipe would hold the generator's event loop for ever. Its kind is told here alone."""
    async with local_learner(CASE, tmp_path) as learner:
        manifest = learner.publish(0)
        path = Path(manifest.offers[0].address)
        path.rename(path.with_name("elsewhere"))
        put(path)
        bucket_set = BucketSet.full(manifest)
        with pytest.raises(WeightsError) as error:
            await learner.receiver().receive(learner.fetch(bucket_set), Arrivals(bucket_set))
        assert error.value.message == f"{path} cannot be mapped: the generator's log says why"
        assert why in caplog.text


async def test_a_file_of_another_user_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner could cut it short, and a signal would end the generator."""
    async with local_learner(CASE, tmp_path) as learner:
        bucket_set = BucketSet.full(learner.publish(0))
        monkeypatch.setattr(shm.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(WeightsError, match="cannot be mapped"):
            await learner.receiver().receive(learner.fetch(bucket_set), Arrivals(bucket_set))
        assert "no file of our user" in caplog.text


@pytest.mark.parametrize(
    "address",
    [
        "{secret}",
        "{shared}/secret",
        "{shared}/../secret",
        "{shared}/rollmesh-weights-/../../secret",
        "{shared}",
        "{shared}/rollmesh-weights-\0",
        "",
    ],
)
def test_nothing_but_files_of_publishers_is_read(tmp_path: Path, address: str) -> None:
    shared, secret = tmp_path / "shm", tmp_path / "secret"
    offered = address.format(shared=shared, secret=secret)
    offer = weights_pb2.Offer(transport="shm", address=offered, host_id=host_id())
    bucket_set = BucketSet.full(weights_pb2.Manifest(offers=[offer]))
    assert "no file of a publisher" in SharedMemory(host_id(), shared).refusal(bucket_set)
    offer.address = f"{shared}/rollmesh-weights-run-1"
    assert SharedMemory(host_id(), shared).refusal(BucketSet.full(weights_pb2.Manifest(offers=[offer]))) == ""
