"""Faults in the middle of a push: what is served is the old version or the new one, whole, and soon.

Damaged bytes, missing bases and links, and swaps that break off have tests where they are handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from rollmesh.mesh.config.weights import EncodingName
from rollmesh.mesh.errors import VersionGoneError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2
from tests.faults.proxy import Conditions, Link, ProxyLoop
from tests.generators.forked import fork
from tests.generators.weights.receiving import Halfway
from tests.generators.weights.test_delta_receiver import Trained
from tests.generators.weights.test_receiver import Learner, Mesh, mesh, same, weights
from tests.generators.weights.transports.cases import CASES
from tests.generators.weights.transports.world import remote_learner

LinkTo: TypeAlias = Callable[[int], Link]
DEADLINE_S = 240.0
# The longest silence.
PATIENCE_S = 1.0


class Reports(asyncio.Queue[weights_pb2.SwapReport]):
    """Reports of the receiver, whether the learner hears of it or not."""

    async def next(self, timeout_s: float = DEADLINE_S) -> weights_pb2.SwapReport:
        return await asyncio.wait_for(self.get(), timeout_s)

    async def success(self) -> weights_pb2.SwapReport:
        while (report := await self.next()).error:
            pass
        return report


@pytest.fixture
def link_to() -> Iterator[LinkTo]:
    """Makes links to ports of this machine."""
    loop = ProxyLoop()
    links: list[Link] = []

    def make(port: int) -> Link:
        links.append(loop.link(port))
        return links[-1]

    yield make
    for link in links:
        link.close()
    loop.close()


def hold_all_but_the_first(learner: Learner) -> asyncio.Event:
    """Buckets from the second on are sent once the event is set."""
    release = asyncio.Event()

    async def held(index: int) -> None:
        if index:
            await release.wait()

    learner.service.before_bucket = held
    return release


async def behind_a_link(world: Mesh, link_to: LinkTo, **settings: Any) -> tuple[Learner, Link]:
    """A learner that the mesh knows by the address of a link to it."""
    learner = Learner(world.shared, **settings)
    world.learners.append(learner)
    await learner.server.start()
    link = await asyncio.to_thread(link_to, learner.port)
    world.membership.name("learner-1", link.port)
    return learner, link


@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_a_link_that_dies_halfway_leaves_the_old_version_until_it_is_back(
    tmp_path: Path, link_to: LinkTo, encoding: EncodingName
) -> None:
    trained, reports, halfway = Trained(), Reports(), Halfway()
    settings: dict[str, Any] = {"transport": "grpc", "encoding": encoding}
    watched = {"timeout_s": PATIENCE_S, "relay": halfway, "on_report": reports.put_nowait}
    async with mesh(tmp_path, **settings, **watched) as world:
        learner, link = await behind_a_link(world, link_to, bucket_bytes=4500, **settings)
        trained.publish(learner)
        assert (await reports.next()).error == ""
        old = dict(world.engine.tensors)
        halfway.reached.clear()
        release = hold_all_but_the_first(learner)
        trained.publish(learner)
        await asyncio.wait_for(halfway.reached.wait(), DEADLINE_S)
        await asyncio.to_thread(link.apply, "*", Conditions("blackhole"))
        release.set()
        # The link of deltas is given up, and then the full bytes.
        report = await reports.next(DEADLINE_S)
        assert "no byte for" in report.error
        assert world.receiver.serving == PolicyVersion(1, 0)
        assert world.engine.served == [PolicyVersion(1, 0)]
        assert same(world.engine, old)
        await asyncio.to_thread(link.apply, "*", Conditions())
        assert (await reports.success()).policy.version == 1
        assert trained.arrived(world.engine)


async def test_a_cut_halfway_ends_in_the_new_version(tmp_path: Path, link_to: LinkTo) -> None:
    halfway = Halfway()
    async with mesh(tmp_path, transport="grpc", timeout_s=DEADLINE_S, relay=halfway) as world:
        learner, link = await behind_a_link(world, link_to, bucket_bytes=30_000)
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        assert (await learner.report()).error == ""
        await asyncio.to_thread(link.apply, "*", Conditions(delay_s=0.02, bytes_per_s=1e6))
        halfway.reached.clear()
        release = hold_all_but_the_first(learner)
        learner.publisher.publish(PolicyVersion(1, 1), weights(1).items(), "float32")
        await asyncio.wait_for(halfway.reached.wait(), DEADLINE_S)
        await asyncio.to_thread(link.apply, "*", Conditions("cut"))
        assert same(world.engine, weights(0))
        release.set()
        await asyncio.to_thread(link.apply, "*", Conditions(delay_s=0.02, bytes_per_s=1e6))
        report = await learner.report(DEADLINE_S)
        assert (report.error, report.policy.version) == ("", 1)
        assert world.engine.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]
        assert same(world.engine, weights(1))
        # Calls that were cut keep no version.
        async with asyncio.timeout(DEADLINE_S):
            while learner.publisher.readers._open:
                await asyncio.sleep(0.01)


async def test_a_publisher_killed_halfway_leaves_the_old_version_until_the_next_learner(
    tmp_path: Path, link_to: LinkTo
) -> None:
    reports, halfway = Reports(), Halfway()
    shared = tmp_path / "shm"
    shared.mkdir()
    watched = {"timeout_s": PATIENCE_S, "relay": halfway, "on_report": reports.put_nowait}
    [case] = [case for case in CASES if case.name == "grpc"]
    async with remote_learner(case, shared) as killed, mesh(shared, transport="grpc", **watched) as world:
        first = await world.learner("learner-0")
        first.publisher.publish(PolicyVersion(0, 3), weights(3).items(), "float32")
        assert (await reports.next()).error == ""
        halfway.reached.clear()
        # 32 MB; the first bucket is there after half a second, the last one seconds later.
        link = await asyncio.to_thread(link_to, killed.port)
        await asyncio.to_thread(link.apply, "*", Conditions(bytes_per_s=4e6))
        world.membership.name("learner-1", link.port)
        await asyncio.wait_for(halfway.reached.wait(), DEADLINE_S)
        await killed.kill()
        report = await reports.next(DEADLINE_S)
        assert (report.policy.incarnation, "no byte for" in report.error) == (1, True)
        assert world.engine.served == [PolicyVersion(0, 3)]
        assert same(world.engine, weights(3))
        successor = await world.learner("learner-2")
        successor.publisher.publish(PolicyVersion(2, 1), weights(1).items(), "float32")
        assert (await reports.success()).policy.incarnation == 2
        assert same(world.engine, weights(1))


async def test_a_receiver_killed_halfway_holds_up_no_one(tmp_path: Path) -> None:
    async with mesh(tmp_path, transport="grpc") as world:
        learner = await world.learner(bucket_bytes=30_000)
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        assert (await learner.report()).error == ""
        release = hold_all_but_the_first(learner)
        address = f"127.0.0.1:{learner.port}"
        dying = await asyncio.to_thread(fork, "tests.generators.weights.receiving", address, "dying")
        try:
            assert await dying.readline() == b"halfway\n"
        finally:
            await dying.end()
        release.set()
        for version in (1, 2):
            learner.publisher.publish(PolicyVersion(1, version), weights(version).items(), "float32")
            report = await learner.report()
            assert (report.error, report.member_id, report.policy.version) == ("", "gen-1", version)
            assert same(world.engine, weights(version))


async def test_of_two_publishers_the_older_one_changes_nothing(tmp_path: Path) -> None:
    reports = Reports()
    async with mesh(tmp_path, on_report=reports.put_nowait) as world:
        whole: list[bool] = []
        update = world.engine.update_weights

        def checked(version: PolicyVersion, *arguments: Any) -> Future[Any]:
            done = update(version, *arguments)
            whole.append(same(world.engine, weights(100 * version.incarnation + version.version)))
            return done

        world.engine.update_weights = checked  # type: ignore[method-assign]  # watched
        learners = {1: await world.learner("learner-1"), 2: await world.learner("learner-2")}
        for version in range(5):
            # Both believe that the run is theirs, and the mesh says now this, now that.
            for incarnation, learner in learners.items():
                world.membership.name(f"learner-{incarnation}", learner.port)
                tensors = weights(100 * incarnation + version)
                learner.publisher.publish(PolicyVersion(incarnation, version), tensors.items(), "float32")
                while (report := await reports.next()).policy != PolicyVersion(incarnation, version).to_proto():
                    pass
                refused = incarnation == 1 and version > 0
                assert (f"incarnation {incarnation} is over" in report.error) == refused
        assert world.engine.served == [PolicyVersion(1, 0), *(PolicyVersion(2, version) for version in range(5))]
        assert all(whole)
        assert world.receiver.serving == PolicyVersion(2, 4)


async def test_a_link_slower_than_the_learner_brings_a_version_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh(tmp_path, transport="grpc", streams=1) as world:
        learner = await world.learner(bucket_bytes=30_000, keep_versions=1, transport="grpc")
        newest = 0

        async def train(index: int) -> None:
            nonlocal newest
            # While each bucket of the first version travels, a newer version comes.
            if index and not world.engine.served:
                newest += 1
                learner.publisher.publish(PolicyVersion(1, newest), weights(newest).items(), "float32")

        learner.service.before_bucket = train
        manifest = learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        assert (await learner.report()).policy.version == 0
        assert newest == len(manifest.buckets) - 1 >= 2
        assert (await learner.report()).policy.version == newest
        assert same(world.engine, weights(newest))
        assert learner.publisher.pushes.summary().errors == 0
        # Memory that was kept for it goes with the next version, some seconds later.
        assert learner.publisher.version(PolicyVersion(1, 0))
        monkeypatch.setattr("rollmesh.mesh.weights.active_readers.GRACE_S", 0.0)
        learner.publisher.publish(PolicyVersion(1, newest + 1), weights(0).items(), "float32")
        assert (await learner.report()).error == ""
        with pytest.raises(VersionGoneError):
            learner.publisher.version(PolicyVersion(1, 0))
