"""Files that are cut short, damaged, removed or out of reach: an error or grpc, never a mixture, never a signal."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.generators.weights.transports.disk import Disk
from rollmesh.learner.weights import transports
from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from rollmesh.protos import weights_pb2
from tests.generators.weights.test_receiver import mesh, same, weights
from tests.generators.weights.transports.cases import CASES
from tests.generators.weights.transports.world import Arrivals, LocalLearner, local_learner

CASE = next(case for case in CASES if case.name == "disk")
DEADLINE_S = 240.0


def _cut(files: list[Path]) -> None:
    os.truncate(files[1], files[1].stat().st_size - 10)


def _cut_in_the_header(files: list[Path]) -> None:
    os.truncate(files[1], 20)


def _empty(files: list[Path]) -> None:
    os.truncate(files[1], 0)


def _remove(files: list[Path]) -> None:
    files[1].unlink()


def _no_safetensors(files: list[Path]) -> None:
    files[1].write_bytes(b"\xff" * 1000)


def _another_version(files: list[Path]) -> None:
    files[1].write_bytes((files[1].parent.with_name("1-0") / files[1].name).read_bytes())


async def fetch(learner: LocalLearner, bucket_set: BucketSet, timeout_s: float = 10.0) -> Arrivals:
    arrivals = Arrivals(bucket_set)
    await asyncio.wait_for(learner.receiver().receive(learner.fetch(bucket_set, timeout_s), arrivals), DEADLINE_S)
    return arrivals


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_cut, "ends 10 bytes early"),
        (_cut_in_the_header, "header cannot be read"),
        (_empty, "does not begin like safetensors"),
        (_remove, "No such file"),
        (_no_safetensors, "does not begin like safetensors"),
        (_another_version, "belongs to version 1:0"),
    ],
)
async def test_harmed_files_are_an_error(tmp_path: Path, harm: Callable[[list[Path]], None], message: str) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        learner.publish(0)
        bucket_set = BucketSet.full(learner.publish(1))
        harm(sorted((tmp_path / "run" / "1-1").glob("*.safetensors")))
        with pytest.raises(WeightsError, match=f"bucket 1 of version 1:1: .*{message}"):
            await fetch(learner, bucket_set)


async def test_a_version_that_goes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        bucket_set = BucketSet.full(learner.publish(0))
        arrivals = Arrivals(bucket_set)
        arrivals.at_first(lambda: [learner.publish(version) for version in (1, 2)])
        with pytest.raises(WeightsError, match=r"bucket 1 of version 1:0: cannot read .*No such file"):
            await learner.receiver().receive(learner.fetch(bucket_set), arrivals)
        assert list(arrivals.copies) == [0]


async def test_a_file_system_that_hangs_is_left_when_the_deadline_has_passed(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        bucket_set = BucketSet.full(learner.publish(0))
        path = min((tmp_path / "run" / "1-0").glob("*.safetensors"))
        path.unlink()
        os.mkfifo(path)
        receiver = learner.receiver()
        assert receiver.refusal(bucket_set) == ""
        with pytest.raises(WeightsError, match="could not be read within 0 s"):
            await receiver.receive(learner.fetch(bucket_set, 0.3), Arrivals(bucket_set))
        # It takes no thread away from verification and swaps, and no second one for the next version.
        assert [thread.daemon for thread in threading.enumerate() if thread.name == "read-weights"] == [True]
        assert "hangs since an earlier version" in receiver.refusal(bucket_set)
        # Releases the thread that still waits for a writer.
        os.close(os.open(path, os.O_WRONLY))
        async with asyncio.timeout(DEADLINE_S):
            while receiver.refusal(bucket_set):
                await asyncio.sleep(0.01)


async def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        bucket_set = BucketSet.full(learner.publish(0))
        with pytest.raises(WeightsError, match=r"cannot read .*/missing/.*No such file"):
            await Disk(tmp_path / "missing").receive(learner.fetch(bucket_set), Arrivals(bucket_set))


def test_refusals_say_what_is_missing(tmp_path: Path) -> None:
    def bucket_set(address: str) -> BucketSet:
        offer = weights_pb2.Offer(transport="disk", address=address)
        return BucketSet(PolicyVersion(1, 0), None, [], [offer])

    assert Disk(tmp_path).refusal(bucket_set("run/1-0")) == ""
    assert Disk(None).refusal(bucket_set("run/1-0")) == "weights.dir is not set here"
    for address in ("/etc", "../run/1-0", "run/../../x"):
        assert "outside weights.dir" in Disk(tmp_path).refusal(bucket_set(address))
    assert Disk(tmp_path).refusal(BucketSet(PolicyVersion(1, 0), None, [])) == "the learner offers no files"


class Harmed(transports.Disk):
    """Writes versions whose last file loses its end, when told to."""

    harm = False

    def offer(self, version: PublishedVersion) -> weights_pb2.Offer | None:
        made = super().offer(version)
        if self.harm and made is not None:
            _cut(sorted((self._folder / made.address).glob("*.safetensors")))
        return made


async def test_a_generator_gets_over_grpc_what_the_disk_does_not_give(tmp_path: Path) -> None:
    async with mesh(tmp_path, transport="disk", folder=tmp_path) as world:
        disk = Harmed(tmp_path, "run")
        learner = await world.learner(transport="disk", offers=[disk], bucket_bytes=30_000)
        for version, transport in enumerate(["disk", "grpc", "disk"]):
            disk.harm = transport == "grpc"
            learner.publisher.publish(PolicyVersion(1, version), weights(version).items(), "float32")
            report = await learner.report()
            assert (report.error, report.transport) == ("", transport)
            assert same(world.engine, weights(version))
            assert ("bytes early" in world.receiver.chosen.text) == disk.harm
