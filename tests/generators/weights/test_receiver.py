"""Publisher and receiver over real gRPC: both transports, damage, cuts, restarts, fences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from rollmesh.generators.engines.types import SwapTimings
from rollmesh.generators.weights import WeightReceiver
from rollmesh.generators.weights.announced_weights import AnnouncedWeights
from rollmesh.generators.weights.learner_connection import LearnerDirectory
from rollmesh.generators.weights.receiver import ReceiverSettings
from rollmesh.learner.engines.interface import ExportedTensor
from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService
from rollmesh.learner.weights.transports import SenderTransport
from rollmesh.learner.weights.version_layout import VersionLayout
from rollmesh.learner.weights.version_part import copy_part, digest_part
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import membership_pb2, weights_pb2, weights_pb2_grpc

SECURITY = SecuritySection()


class Membership:
    """Stands in for the agent: says who the learner is."""

    def __init__(self) -> None:
        self.member_id = "receiver"
        self.learner: membership_pb2.Member | None = None
        self.policy: PolicyVersion | None = None
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def heartbeat(self) -> None:
        """Nothing new."""

    def name(self, member_id: str, port: int) -> None:
        self.learner = membership_pb2.Member(member_id=member_id, address=f"127.0.0.1:{port}")
        for listener in self._listeners:
            listener()


class Engine:
    """Takes weights like an engine; `hold` makes swaps wait, as pinned requests do."""

    def __init__(self) -> None:
        self.served: list[PolicyVersion] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.hold: list[Future[None]] = []
        self.dropped = False
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def update_weights(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]] | None, digest: str
    ) -> Future[SwapTimings]:
        done: Future[SwapTimings] = Future()
        self._loop.call_soon_threadsafe(self.asked.set)

        def swap(_: object = None) -> None:
            if tensors is not None:
                self.tensors = {name: tensor.clone() for name, tensor in tensors}
            elif self.dropped:
                done.set_exception(WeightsError("others are in service"))
                return
            self.served.append(version)
            done.set_result(SwapTimings(version, digest, 1.0, 1.0, 2.0, 0))

        if self.hold:
            self.hold.pop().add_done_callback(swap)
        else:
            swap()
        return done


class Service(WeightsService):
    """The learner's service with faults to order."""

    def __init__(self, publisher: WeightPublisher) -> None:
        super().__init__(publisher)
        self.flip = False
        self.cut_after = 0
        self.on_fetch: Callable[[], None] | None = None
        self.before_bucket: Callable[[int], Awaitable[object]] | None = None
        self.offsets: list[int] = []
        self.reports: asyncio.Queue[weights_pb2.SwapReport] = asyncio.Queue()

    async def FetchBucket(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.offsets.append(request.offset)
        if self.on_fetch is not None:
            self.on_fetch()
        if self.before_bucket is not None:
            await self.before_bucket(request.bucket)
        async for serialized in super().FetchBucket(request, context):
            chunk = weights_pb2.BucketChunk.FromString(serialized)
            if self.cut_after and chunk.offset >= self.cut_after:
                self.cut_after = 0
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            if self.flip:
                chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
            yield chunk

    async def Report(self, request: weights_pb2.SwapReport, context: Any) -> weights_pb2.ReportResponse:
        response = await super().Report(request, context)
        self.reports.put_nowait(request)
        return response


class Learner:
    """A publisher with its server."""

    def __init__(self, shared: Path, offers: Sequence[SenderTransport] = (), **settings: Any) -> None:
        rules = PublishRules(**settings)
        self.publisher = WeightPublisher("run", {"config.json": b"{}"}, rules, directory=shared, offers=offers)
        self.service = Service(self.publisher)
        self.server = new_server(SECURITY)
        weights_pb2_grpc.add_WeightsServicer_to_server(self.service, self.server)
        self.port = bind(self.server, "127.0.0.1", 0, SECURITY)

    async def report(self, timeout: float = 60.0) -> weights_pb2.SwapReport:
        return await asyncio.wait_for(self.service.reports.get(), timeout)

    async def stop(self) -> None:
        await self.server.stop(0)
        self.publisher.close()


class Mesh:
    """Everything of one test."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self.membership = Membership()
        self.engine = Engine()
        self.learners: list[Learner] = []
        self.receiver: WeightReceiver

    async def learner(self, name: str = "learner-1", **settings: Any) -> Learner:
        learner = Learner(self.shared, **settings)
        await learner.server.start()
        self.learners.append(learner)
        self.membership.name(name, learner.port)
        return learner


@asynccontextmanager
async def mesh(shared: Path, **settings: Any) -> AsyncIterator[Mesh]:
    world = Mesh(shared)
    link = LearnerDirectory(world.membership, SECURITY)  # type: ignore[arg-type]  # the part of the agent that it uses
    wired = {name: settings.pop(name) for name in ("relay", "pinned", "on_report") if name in settings}
    world.receiver = WeightReceiver(
        link,
        world.engine,  # type: ignore[arg-type]  # the part of an engine that it uses
        ReceiverSettings(
            member_id="gen-1",
            run="run",
            host_id=settings.pop("host", host_id()),
            shared=shared,
            **{"timeout_s": 5.0, **settings},
        ),
        **wired,
    )
    task = asyncio.create_task(world.receiver.run())
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.close()
        for learner in world.learners:
            await learner.stop()


def weights(seed: int, rows: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(rows, 64, generator=generator) for i in range(8)}


def same(engine: Engine, expected: dict[str, torch.Tensor]) -> bool:
    return engine.tensors.keys() == expected.keys() and all(
        torch.equal(engine.tensors[k], expected[k]) for k in expected
    )


async def test_a_suspension_right_after_a_resumption_holds(tmp_path: Path) -> None:
    async def fetches() -> bool:
        for _ in range(10):
            await asyncio.sleep(0)
        return "apply-weights" in {task.get_name() for task in asyncio.all_tasks()}

    async with mesh(tmp_path) as world:
        assert await fetches()
        await world.receiver.suspend()
        assert not await fetches()
        world.receiver.resume()
        await world.receiver.suspend()
        assert not await fetches()
        world.receiver.resume()
        assert await fetches()


async def test_a_version_that_is_being_written_disturbs_no_reader_and_is_not_seen(tmp_path: Path) -> None:
    async with mesh(tmp_path, host="elsewhere") as world:
        learner = await world.learner(keep_versions=1, bucket_bytes=30_000)
        publisher, new = learner.publisher, weights(1)
        layout = VersionLayout([ExportedTensor(n, t.dtype, tuple(t.shape)) for n, t in new.items()], 30_000)
        part, file = layout.part(0), publisher.allocate(layout.nbytes)
        written: list[int] = []

        async def write_some(bucket: int) -> None:
            copy_part(part[: bucket + 1], list(new.items())[: bucket + 1], file.view())
            written.append(bucket)

        learner.service.before_bucket = write_some
        publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        assert (await learner.report()).error == ""
        assert written
        assert same(world.engine, weights(0))
        copy_part(part, new.items(), file.view())
        digests = {0: digest_part(part, file.view())}
        assert publisher.newest is not None
        assert publisher.newest.policy.version == 0
        assert len(list(tmp_path.iterdir())) == 1
        learner.service.before_bucket = None
        publisher.complete(PolicyVersion(1, 1), layout, file, digests)
        assert (await learner.report()).policy.version == 1
        assert same(world.engine, new)


@pytest.mark.parametrize("host", [host_id(), "elsewhere"])
@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_weights_that_have_not_changed_are_not_transferred(tmp_path: Path, host: str, encoding: str) -> None:
    async with mesh(tmp_path, host=host, encoding=encoding) as world:
        learner = await world.learner(keep_versions=2, encoding=encoding)
        first = learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        await learner.report()
        learner.service.offsets.clear()
        for version in range(1, 4):
            again = learner.publisher.republish(PolicyVersion(1, version))
            assert again.digest == first.digest
            report = await learner.report()
            assert (report.error, report.policy.version, report.bytes, report.transport) == ("", version, 0, "")
            assert world.receiver.serving == PolicyVersion(1, version)
            assert world.receiver.announced(PolicyVersion(1, version)) == AnnouncedWeights(again)
        assert not learner.service.offsets
        # An engine that has given its weights up is brought them again, from the one file that there is.
        world.engine.dropped = True
        learner.publisher.republish(PolicyVersion(1, 4))
        report = await learner.report()
        assert (report.policy.version, report.transport) == (4, "shm" if host != "elsewhere" else "grpc")
        assert len(list(tmp_path.iterdir())) == 1
        # The next weights come by a delta from the first.
        changed = {**weights(0), "layer.3.weight": weights(1)["layer.3.weight"]}
        learner.publisher.publish(PolicyVersion(1, 5), changed.items(), "float32")
        report = await learner.report()
        assert (report.error, report.encoding) == ("", encoding)
        assert same(world.engine, changed)


@pytest.mark.parametrize(("host", "transport"), [(host_id(), "shm"), ("elsewhere", "grpc")])
async def test_versions_arrive_whole(tmp_path: Path, host: str, transport: str) -> None:
    async with mesh(tmp_path, host=host) as world:
        learner = await world.learner(bucket_bytes=30_000)
        for version in range(3):
            manifest = learner.publisher.publish(PolicyVersion(1, version), weights(version).items(), "float32")
            report = await learner.report()
            assert (report.error, report.transport) == ("", transport)
            assert report.choice == world.receiver.chosen.text
            assert report.choice.startswith(f"{transport} (not " if transport == "grpc" else "shm")
            assert report.digest == manifest.digest == world.receiver.digest
            assert report.policy.version == version
            assert report.first_byte_us <= report.last_byte_us <= report.total_us
            assert same(world.engine, weights(version))
        pushes = learner.publisher.pushes.summary()
        assert pushes.count == 3
        assert pushes.errors == 0
        assert 0 < pushes.p50["first_byte"] <= pushes.p50["last_byte"] <= pushes.p50["total"] <= pushes.p99["total"]
        assert pushes.p50["pause"] == 2.0
        [entry] = learner.publisher.pushes.to_proto().receivers
        assert (entry.member_id, entry.last.policy, entry.last.digest) == ("gen-1", manifest.policy, manifest.digest)
        assert entry.last.total_us <= entry.last_ack_us
        assert world.receiver.waiting_reason == ""


async def test_a_damaged_shared_file_is_not_served(tmp_path: Path) -> None:
    async with mesh(tmp_path, transport="shm") as world:
        learner = await world.learner()
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        assert (await learner.report()).error == ""

        def announce_damaged() -> None:
            manifest = learner.publisher.newest
            assert manifest is not None
            with Path(manifest.offers[0].address).open("r+b") as file:
                file.seek(100)
                byte = file.read(1)[0]
                file.seek(100)
                file.write(bytes([byte ^ 4]))

        undo = learner.publisher.subscribe(announce_damaged)
        # Listeners are told in order: damage is done before the watchers hear of the version.
        learner.publisher._listeners.reverse()
        learner.publisher.publish(PolicyVersion(1, 1), weights(1).items(), "float32")
        report = await learner.report()
        assert "bucket 0 of version 1:1 is damaged" in report.error
        assert world.receiver.serving == PolicyVersion(1, 0)
        assert world.engine.served == [PolicyVersion(1, 0)]
        assert same(world.engine, weights(0))
        undo()
        learner.publisher.publish(PolicyVersion(1, 2), weights(2).items(), "float32")
        while (report := await learner.report()).error:
            pass
        assert world.engine.served == [PolicyVersion(1, 0), PolicyVersion(1, 2)]
        assert learner.publisher.pushes.summary().errors >= 1


async def test_bytes_damaged_on_the_way_are_fetched_again(tmp_path: Path) -> None:
    async with mesh(tmp_path, transport="grpc") as world:
        learner = await world.learner()
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        assert (await learner.report()).error == ""
        learner.service.flip = True
        learner.publisher.publish(PolicyVersion(1, 1), weights(1).items(), "float32")
        report = await learner.report()
        assert "is damaged" in report.error
        assert report.digest == world.receiver.digest
        assert world.receiver.serving == PolicyVersion(1, 0)
        assert "could not be taken" in world.receiver.waiting_reason
        learner.service.flip = False
        while (report := await learner.report()).error:
            pass
        assert report.policy.version == 1
        assert same(world.engine, weights(1))


async def test_a_cut_transfer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    async with mesh(tmp_path, transport="grpc") as world:
        learner = await world.learner()
        learner.service.cut_after = 2 << 20
        learner.publisher.publish(PolicyVersion(1, 0), weights(0, rows=2000).items(), "float32")
        assert (await learner.report()).error == ""
        assert learner.service.offsets == [0, 2 << 20]
        assert same(world.engine, weights(0, rows=2000))


async def test_a_missing_shared_file_falls_back_to_grpc(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        # Another mount of shared memory: same host, but the file is not there.
        learner.publisher.subscribe(lambda: Path(learner.publisher.newest.offers[0].address).unlink())  # type: ignore[union-attr]
        learner.publisher._listeners.reverse()
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        report = await learner.report()
        assert (report.error, report.transport) == ("", "grpc")
        assert same(world.engine, weights(0))


async def test_shm_across_hosts_is_refused_by_name(tmp_path: Path) -> None:
    async with mesh(tmp_path, host="elsewhere", transport="shm") as world:
        learner = await world.learner()
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        assert "shares no memory" in (await learner.report()).error
        assert world.receiver.serving is None


async def test_a_new_learner_rolls_generators_back_and_the_old_one_is_refused(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        old = await world.learner()
        old.publisher.publish(PolicyVersion(1, 7), weights(7).items(), "float32")
        assert (await old.report()).error == ""
        new = await world.learner("learner-2")
        new.publisher.publish(PolicyVersion(2, 4), weights(4).items(), "float32")
        report = await new.report()
        assert report.error == ""
        assert world.receiver.serving == PolicyVersion(2, 4)
        assert same(world.engine, weights(4))
        # The membership is wrong for a moment: what the fenced learner says is refused whatever its version.
        old.publisher.publish(PolicyVersion(1, 8), weights(8).items(), "float32")
        world.membership.name("learner-1", old.port)
        assert "incarnation 1 is over" in (await old.report()).error
        assert world.receiver.serving == PolicyVersion(2, 4)


async def test_a_restarted_server_is_watched_again(tmp_path: Path) -> None:
    async with mesh(tmp_path, transport="grpc") as world:
        first = await world.learner()
        first.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        await first.report()
        await first.server.stop(0)
        second = await world.learner("learner-2")
        second.publisher.publish(PolicyVersion(2, 0), weights(1).items(), "float32")
        assert (await second.report()).error == ""
        assert same(world.engine, weights(1))


async def test_a_learner_that_ends_its_watches_is_held_up_by_none_and_the_mesh_is_asked_at_once(tmp_path: Path) -> None:
    """The mesh says whether the run is finished; its heartbeats would ask seconds later."""
    asked = asyncio.Event()

    async def ask() -> None:
        asked.set()

    async with mesh(tmp_path) as world:
        learner = await world.learner()
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        await learner.report()
        world.membership.heartbeat = ask  # type: ignore[method-assign]
        learner.service.end_watches()
        await asked.wait()
        # A grace that outlasts the test: whatever is open now would use it up.
        await learner.server.stop(3600)


async def test_a_dead_learner_mid_transfer_does_not_hold_up_the_next(tmp_path: Path) -> None:
    async with mesh(tmp_path, transport="grpc", timeout_s=100.0) as world:
        first = await world.learner()

        async def stuck(request: Any, context: Any) -> AsyncIterator[weights_pb2.BucketChunk]:
            reached.set()
            await asyncio.Event().wait()
            yield weights_pb2.BucketChunk()

        reached = asyncio.Event()
        first.service.FetchBucket = stuck  # type: ignore[method-assign]  # a learner that hangs
        await first.server.stop(0)
        first.server = new_server(SECURITY)
        weights_pb2_grpc.add_WeightsServicer_to_server(first.service, first.server)
        first.port = bind(first.server, "127.0.0.1", 0, SECURITY)
        await first.server.start()
        world.membership.name("learner-1", first.port)
        first.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        await asyncio.wait_for(reached.wait(), 180)
        second = await world.learner("learner-2")
        second.publisher.publish(PolicyVersion(2, 0), weights(1).items(), "float32")
        assert (await second.report()).error == ""
        assert same(world.engine, weights(1))


async def test_intermediate_versions_are_skipped_while_a_swap_waits(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner(keep_versions=2)
        release: Future[None] = Future()
        world.engine.hold.append(release)
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        await asyncio.wait_for(world.engine.asked.wait(), 180)
        assert "waits for the engine to swap to version 1:0" in world.receiver.waiting_reason
        for version in range(1, 6):
            learner.publisher.publish(PolicyVersion(1, version), weights(version).items(), "float32")
        # Version 0 is unlinked by now; its mapping is still whole.
        release.set_result(None)
        assert (await learner.report()).policy.version == 0
        while (await learner.report()).policy.version != 5:
            pass
        assert len(world.engine.served) <= 4
        assert same(world.engine, weights(5))


async def test_a_version_that_is_overtaken_while_it_is_fetched_is_no_failure(tmp_path: Path) -> None:
    async with mesh(tmp_path, transport="grpc") as world:
        learner = await world.learner(keep_versions=1, transport="grpc")

        def step() -> None:
            learner.service.on_fetch = None
            learner.publisher.publish(PolicyVersion(1, 1), weights(1).items(), "float32")

        learner.service.on_fetch = step
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        report = await learner.report()
        assert (report.error, report.policy.version) == ("", 1)
        assert learner.publisher.pushes.summary().errors == 0
        assert same(world.engine, weights(1))


async def test_weights_of_another_run_are_refused(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        learner.publisher.run = "other"
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        assert "weights of run 'other'" in (await learner.report()).error
        assert world.receiver.serving is None


async def test_a_late_joiner_is_timed_from_its_arrival(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        learner = Learner(tmp_path)
        world.learners.append(learner)
        manifest = learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        manifest.announced_unix_ns = time.time_ns() - 3600 * 10**9
        await learner.server.start()
        world.membership.name("learner-1", learner.port)
        assert (await learner.report()).total_us < 60 * 10**6


async def test_engine_refusal_is_reported(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner()

        def refuse(*_: object) -> Future[SwapTimings]:
            failed: Future[SwapTimings] = Future()
            failed.set_exception(WeightsError("tensor lm_head.weight is missing"))
            return failed

        world.engine.update_weights = refuse  # type: ignore[method-assign]  # an engine of another architecture
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        assert "lm_head.weight is missing" in (await learner.report()).error
        assert not world.receiver.has_weights.is_set()
