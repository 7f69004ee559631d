"""Versions by deltas over real gRPC: bit for bit, and in full by itself where deltas do not lead there."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2
from tests.generators.weights.test_receiver import Engine, Learner, Mesh, mesh

BY_DELTAS = {"encoding": "delta", "transport": "grpc"}


class Trained:
    """A model in float32 whose weights travel in another dtype, and change as an optimizer changes them."""

    def __init__(self, wire: torch.dtype = torch.bfloat16, lr: float = 1e-6) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(300, 32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        self.model.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.model.register_buffer("mask", torch.zeros(70, dtype=torch.bool))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.wire = wire
        self.version = -1

    def publish(self, learner: Learner, *, incarnation: int = 1) -> weights_pb2.Manifest:
        """Takes a step and makes it the next version."""
        self.version += 1
        output = self.model(torch.randint(300, (8, 5)))
        output.square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.model.get_buffer("steps").add_(1)
            self.model.get_buffer("mask")[self.version % 70] ^= True
        policy = PolicyVersion(incarnation, self.version)
        return learner.publisher.publish(policy, self.model.state_dict().items(), self.wire)

    def arrived(self, engine: Engine) -> bool:
        """True where the engine has the weights of now, bit for bit."""
        expected = {
            name: tensor.to(self.wire) if tensor.is_floating_point() else tensor
            for name, tensor in self.model.state_dict().items()
        }
        return engine.tensors.keys() == expected.keys() and all(
            tensor.dtype == engine.tensors[name].dtype
            and torch.equal(tensor.view(torch.uint8), engine.tensors[name].view(torch.uint8))
            for name, tensor in expected.items()
        )


def full_bytes(manifest: weights_pb2.Manifest) -> int:
    return sum(bucket.nbytes for bucket in manifest.buckets)


async def push(world: Mesh, learner: Learner, trained: Trained) -> weights_pb2.SwapReport:
    """The next version, put into service."""
    manifest = trained.publish(learner)
    report = await learner.report()
    assert (report.error, report.policy.version) == ("", trained.version)
    assert report.digest == manifest.digest
    assert trained.arrived(world.engine)
    if report.encoding == "full":
        assert report.bytes == full_bytes(manifest)
    return report


async def test_fifty_deltas_arrive_bit_for_bit(tmp_path: Path) -> None:
    trained = Trained()
    async with mesh(tmp_path, **BY_DELTAS) as world:
        learner = await world.learner(**BY_DELTAS)
        first = await push(world, learner, trained)
        assert first.encoding == "full"
        moved = []
        for _ in range(50):
            report = await push(world, learner, trained)
            assert (report.encoding, report.transport) == ("delta", "grpc")
            moved.append(report.bytes)
        assert sum(moved) < 0.1 * 50 * first.bytes
        # One copy is kept, and no more than that.
        assert first.bytes <= report.kept_bytes < 1.1 * first.bytes
        assert learner.publisher.pushes.summary().errors == 0


@pytest.mark.parametrize("wire", [torch.float16, torch.float32, torch.float8_e4m3fn])
async def test_other_dtypes(tmp_path: Path, wire: torch.dtype) -> None:
    trained = Trained(wire, lr=1e-5)
    async with mesh(tmp_path, **BY_DELTAS) as world:
        learner = await world.learner(bucket_bytes=5000, **BY_DELTAS)
        assert [(await push(world, learner, trained)).encoding for _ in range(3)] == ["full", "delta", "delta"]


async def test_a_late_joiner_begins_in_full(tmp_path: Path) -> None:
    trained = Trained()
    async with mesh(tmp_path, **BY_DELTAS) as world:
        learner = Learner(tmp_path, **BY_DELTAS)
        world.learners.append(learner)
        for _ in range(3):
            trained.publish(learner)
        await learner.server.start()
        world.membership.name("learner-1", learner.port)
        report = await learner.report()
        assert (report.encoding, report.policy.version) == ("full", 2)
        assert trained.arrived(world.engine)
        assert (await push(world, learner, trained)).encoding == "delta"


@pytest.mark.parametrize(("missed", "encoding"), [(3, "delta"), (5, "full")])
async def test_one_that_was_away_takes_the_chain_as_far_as_it_reaches(
    tmp_path: Path, missed: int, encoding: str
) -> None:
    trained = Trained()
    async with mesh(tmp_path, **BY_DELTAS) as world:
        learner = await world.learner(chain=3, **BY_DELTAS)
        links = asyncio.Event()
        loop = asyncio.get_running_loop()

        def changed() -> None:
            loop.call_soon_threadsafe(links.set)

        learner.publisher.subscribe(changed)
        chain = learner.publisher.chain
        assert chain is not None
        await push(world, learner, trained)
        hold: Future[None] = Future()
        world.engine.hold.append(hold)
        world.engine.asked.clear()
        trained.publish(learner)
        await asyncio.wait_for(world.engine.asked.wait(), 180)
        # It serves version 0 still, and cannot take any other, while these are made.
        for _ in range(missed):
            manifest = trained.publish(learner)
            while not chain.links_to(manifest.digest):
                links.clear()
                await asyncio.wait_for(links.wait(), 180)
        async with asyncio.timeout(180):
            while (pending := world.receiver._pending) is None or pending.policy.version < trained.version:
                await asyncio.sleep(0.01)
        hold.set_result(None)
        assert (await learner.report()).policy.version == 1
        report = await learner.report()
        while report.policy.version < trained.version:
            report = await learner.report()
        assert report.encoding == encoding
        assert trained.arrived(world.engine)


async def test_a_missing_base_is_fetched_in_full(tmp_path: Path) -> None:
    trained = Trained()
    async with mesh(tmp_path, **BY_DELTAS) as world:
        learner = await world.learner(**BY_DELTAS)
        await push(world, learner, trained)
        world.receiver._fetcher._base.drop()
        assert (await push(world, learner, trained)).encoding == "full"
        assert (await push(world, learner, trained)).encoding == "delta"


async def test_a_damaged_link_is_replaced_by_the_full_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    async with mesh(tmp_path, **BY_DELTAS) as world:
        learner = await world.learner(**BY_DELTAS)
        await push(world, learner, trained)
        chain = learner.publisher.chain
        assert chain is not None
        bucket = chain.bucket

        def damaged(*which: Any) -> bytes:
            data = bytearray(bucket(*which))
            data[len(data) // 2] ^= 16
            return bytes(data)

        with monkeypatch.context() as patch:
            patch.setattr(chain, "bucket", damaged)
            assert (await push(world, learner, trained)).encoding == "full"
        assert (await push(world, learner, trained)).encoding == "delta"
        assert learner.publisher.pushes.summary().errors == 0


async def test_a_link_that_is_gone_is_replaced_by_the_full_bytes(tmp_path: Path) -> None:
    trained = Trained()
    async with mesh(tmp_path, **BY_DELTAS) as world:
        learner = await world.learner(**BY_DELTAS)
        await push(world, learner, trained)
        chain = learner.publisher.chain
        assert chain is not None
        # Announced with its link, which is released before it can be asked for.
        with_links = learner.publisher.with_links

        def announce_and_forget(manifest: weights_pb2.Manifest) -> weights_pb2.Manifest:
            announced = with_links(manifest)
            assert announced.deltas
            chain._links.clear()
            return announced

        learner.publisher.with_links = announce_and_forget  # type: ignore[method-assign]
        assert (await push(world, learner, trained)).encoding == "full"


async def test_what_does_not_become_the_announced_bytes_is_thrown_away(tmp_path: Path) -> None:
    trained = Trained()
    async with mesh(tmp_path, **BY_DELTAS) as world:
        learner = await world.learner(**BY_DELTAS)
        await push(world, learner, trained)
        # The base is not what it is taken for: memory has gone bad.
        world.receiver._fetcher._base._data[1000] ^= 1
        assert (await push(world, learner, trained)).encoding == "full"
        assert (await push(world, learner, trained)).encoding == "delta"


async def test_another_learner_has_no_links_to_what_was_before(tmp_path: Path) -> None:
    trained = Trained()
    async with mesh(tmp_path, **BY_DELTAS) as world:
        first = await world.learner(**BY_DELTAS)
        for _ in range(3):
            await push(world, first, trained)
        second = await world.learner("learner-2", **BY_DELTAS)
        trained.version = 0
        for encoding in ("full", "delta"):
            trained.publish(second, incarnation=2)
            report = await second.report()
            assert (report.error, report.encoding) == ("", encoding)
            assert trained.arrived(world.engine)


async def test_shared_memory_needs_no_deltas_and_no_copy(tmp_path: Path) -> None:
    trained = Trained()
    async with mesh(tmp_path, encoding="auto") as world:
        learner = await world.learner(encoding="auto")
        for _ in range(3):
            report = await push(world, learner, trained)
            assert (report.transport, report.encoding, report.kept_bytes) == ("shm", "full", 0)


async def test_a_mapped_file_is_a_base_as_well(tmp_path: Path) -> None:
    trained = Trained()
    async with mesh(tmp_path, encoding="delta", host=host_id()) as world:
        learner = await world.learner(encoding="delta")
        first = await push(world, learner, trained)
        assert (first.transport, first.encoding) == ("shm", "full")
        for _ in range(3):
            report = await push(world, learner, trained)
            assert (report.transport, report.encoding) == ("grpc", "delta")


async def test_auto_is_by_delta_once_the_network_is_known_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained()
    async with mesh(tmp_path, encoding="auto", host="elsewhere") as world:
        learner = await world.learner(encoding="auto")
        monkeypatch.setattr(learner.publisher.pushes, "bytes_per_s", lambda _: 1e12)
        assert [(await push(world, learner, trained)).encoding for _ in range(3)] == ["full", "full", "full"]
        monkeypatch.setattr(learner.publisher.pushes, "bytes_per_s", lambda _: 1000.0)
        assert [(await push(world, learner, trained)).encoding for _ in range(3)] == ["delta", "delta", "delta"]
