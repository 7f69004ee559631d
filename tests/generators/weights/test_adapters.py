"""Versions that are adapters: the base comes once, over every transport, through restarts, from relays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rollmesh.generators.weights.served_digest import inspect
from rollmesh.learner.weights import transports as learner_offers
from rollmesh.learner.weights.transports import SenderTransport
from rollmesh.mesh.config.network import NetworkSection
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.adapter import FROZEN_BASE, factor_names
from rollmesh.mesh.weights.merging import merge
from tests.generators.weights.test_receiver import SECURITY, Learner, mesh, same, weights

SCALE = 0.5
ADAPTED = ("layer.0.weight", "layer.5.weight")
BASE = weights(0)
BASE_BYTES = sum(tensor.nbytes for tensor in BASE.values())


def adapter(seed: int) -> dict[str, torch.Tensor]:
    """A and B of two layers, of rank 2."""
    torch.manual_seed(seed)
    factors: dict[str, torch.Tensor] = {}
    for weight in ADAPTED:
        a, b = factor_names(weight)
        factors |= {a: torch.randn(2, 64), b: torch.randn(40, 2)}
    return factors


ADAPTER_BYTES = sum(tensor.nbytes for tensor in adapter(0).values())


def effective(seed: int) -> dict[str, torch.Tensor]:
    factors = adapter(seed)
    return BASE | {
        weight: merge(BASE[weight], factors[a], factors[b], SCALE)
        for weight, (a, b) in ((weight, factor_names(weight)) for weight in ADAPTED)
    }


def publish_base(learner: Learner) -> None:
    learner.publisher.publish(FROZEN_BASE, BASE.items(), "float32")


def publish(learner: Learner, version: int, seed: int | None = None, incarnation: int = 1) -> None:
    factors = adapter(version if seed is None else seed)
    learner.publisher.publish(PolicyVersion(incarnation, version), factors.items(), "float32")


def _offers(transport: str, folder: Path) -> list[SenderTransport]:
    if transport == "disk":
        return [learner_offers.Disk(folder, "run")]
    if transport == "gloo":
        rendezvous = learner_offers.Rendezvous(NetworkSection(), SECURITY)
        return [learner_offers.Broadcast("gloo", rendezvous, timeout_s=5.0, window_s=0.1)]
    return []


@pytest.mark.parametrize("transport", ["shm", "grpc", "disk", "gloo"])
async def test_the_base_comes_once_and_then_adapters_alone(tmp_path: Path, transport: str) -> None:
    host = host_id() if transport == "shm" else "elsewhere"
    folder = tmp_path / "weights"
    async with mesh(tmp_path, host=host, transport=transport, folder=folder) as world:
        offers = _offers(transport, folder)
        learner = await world.learner(
            offers=offers, adapter_scale=SCALE, transport=transport, bucket_bytes=30_000, keep_versions=1
        )
        publish_base(learner)
        for version in range(3):
            publish(learner, version)
            report = await learner.report()
            assert (report.error, report.transport, report.policy.version) == ("", transport, version)
            assert report.bytes == ADAPTER_BYTES + (BASE_BYTES if version == 0 else 0)
            assert same(world.engine, effective(version))
            announced = world.receiver.announced(PolicyVersion(1, version))
            assert announced is not None
            assert inspect(announced, world.engine.tensors).digest == world.receiver.digest
            lost = inspect(announced, BASE)
            assert lost.differing == list(ADAPTED)
            assert lost.digest != world.receiver.digest
        assert report.kept_bytes == (0 if transport == "shm" else BASE_BYTES)


async def test_a_learner_that_starts_again_sends_no_base_again(tmp_path: Path) -> None:
    async with mesh(tmp_path, host="elsewhere") as world:
        first = await world.learner(adapter_scale=SCALE)
        publish_base(first)
        publish(first, 3)
        await first.report()
        await first.stop()
        world.learners.remove(first)
        second = await world.learner("learner-2", adapter_scale=SCALE)
        publish_base(second)
        # It continues from an earlier version.
        publish(second, 2, incarnation=2)
        report = await second.report()
        assert (report.error, report.bytes) == ("", ADAPTER_BYTES)
        assert same(world.engine, effective(2))
        # Weights that have not changed do not travel at all, and their bytes are known.
        second.publisher.republish(PolicyVersion(2, 3))
        assert (await second.report()).bytes == 0
        announced = world.receiver.announced(PolicyVersion(2, 3))
        assert announced is not None
        assert inspect(announced, world.engine.tensors).digest == world.receiver.digest


async def test_an_engine_without_weights_gets_them_from_the_base_that_is_here(tmp_path: Path) -> None:
    """Where devices are shared only the adapter travels."""
    async with mesh(tmp_path, host="elsewhere") as world:
        learner = await world.learner(adapter_scale=SCALE)
        publish_base(learner)
        publish(learner, 0)
        await learner.report()
        await world.receiver.suspend()
        await world.receiver.forget_weights()
        world.engine.tensors = {}
        world.receiver.resume()
        assert (await learner.report()).bytes == ADAPTER_BYTES
        assert same(world.engine, effective(0))


async def test_adapters_come_by_deltas_too(tmp_path: Path) -> None:
    async with mesh(tmp_path, host="elsewhere", encoding="delta") as world:
        learner = await world.learner(adapter_scale=SCALE, encoding="delta")
        publish_base(learner)
        publish(learner, 0)
        await learner.report()
        factors = adapter(0)
        factors[factor_names(ADAPTED[0])[0]] += 1.0
        learner.publisher.publish(PolicyVersion(1, 1), factors.items(), "float32")
        report = await learner.report()
        assert (report.error, report.encoding) == ("", "delta")
        assert 0 < report.bytes < ADAPTER_BYTES


async def test_a_base_that_does_not_come_leaves_the_former_weights(tmp_path: Path) -> None:
    async with mesh(tmp_path, host="elsewhere") as world:
        learner = await world.learner(adapter_scale=SCALE)
        publish_base(learner)
        learner.service.flip = True
        publish(learner, 0)
        assert "bucket 0 of version 0:0 is damaged" in (await learner.report()).error
        assert world.receiver.serving is None
        learner.service.flip = False
        while (report := await learner.report()).error:
            await asyncio.sleep(0)
        assert report.bytes == ADAPTER_BYTES + BASE_BYTES
        assert same(world.engine, effective(0))
