"""The host copy: deltas start from it, and whatever becomes of them, it stays as it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollmesh.generators.weights.delta_base import DeltaBase
from rollmesh.generators.weights.verified_transfer import VerifiedWeights
from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet, digest_of
from rollmesh.protos import weights_pb2


class Chain:
    """Versions of a publisher and their links, fetched without a network."""

    def __init__(self, folder: Path) -> None:
        self.publisher = WeightPublisher(
            "run", {}, PublishRules(transport="grpc", encoding="delta", bucket_bytes=4000), directory=folder
        )
        encoded = threading.Semaphore(0)
        tensors = {f"t{i}": torch.randn(1500) for i in range(4)}
        for version in range(4):
            tensors["t2"] = tensors["t2"] + (torch.rand(1500) < 0.01)
            self.publisher.publish(PolicyVersion(1, version), tensors.items(), torch.bfloat16)
            if version == 0:
                self.publisher.subscribe(encoded.release)
                self.first = self.publisher.version(PolicyVersion(1, 0))
            else:
                # Published, and encoded.
                assert encoded.acquire(timeout=120)
                assert encoded.acquire(timeout=120)
        newest = self.publisher.version(PolicyVersion(1, 3))
        self.manifest = self.publisher.with_links(newest.manifest)
        self.expected = bytes(newest.data.view())
        self.fetched: list[BucketSet] = []

    async def receive(self, bucket_set: BucketSet) -> VerifiedWeights:
        self.fetched.append(bucket_set)
        data = bytearray(bucket_set.nbytes)
        for index, start in enumerate(bucket_set.starts[:-1]):
            part = self.publisher.bucket(bucket_set.policy, index, bucket_set.base)
            data[start : start + len(part)] = part
        moved = sum(bucket.nbytes for bucket in bucket_set.buckets)
        return VerifiedWeights(
            memoryview(data), "grpc", bucket_set.encoding, moved, "", len(self.fetched), len(self.fetched)
        )


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    torch.manual_seed(0)
    chain = Chain(tmp_path)
    yield chain
    chain.publisher.close()


def base_of(chain: Chain) -> tuple[DeltaBase, bytearray]:
    held = bytearray(chain.first.data.view())
    base = DeltaBase()
    base.keep(chain.first.manifest, memoryview(held))
    return base, held


async def test_several_links_lead_to_the_newest_and_leave_the_base_alone(chain: Chain) -> None:
    base, held = base_of(chain)
    advanced = await base.apply_deltas(chain.manifest, chain.receive)
    assert advanced is not None
    assert advanced.data == chain.expected
    assert [bucket_set.policy.version for bucket_set in chain.fetched] == [1, 2, 3]
    assert (advanced.encoding, advanced.first_byte_ns) == ("delta", 1)
    assert advanced.nbytes == sum(bucket.nbytes for link in chain.manifest.deltas for bucket in link.buckets)
    assert held == chain.first.data.view()
    assert base.nbytes == len(held)


async def test_nothing_is_fetched_without_a_base(chain: Chain) -> None:
    base, _ = base_of(chain)
    base.drop()
    assert await base.apply_deltas(chain.manifest, chain.receive) is None
    assert (base.nbytes, chain.fetched) == (0, [])


async def test_a_wrong_base_is_found_by_the_digests_of_the_result(chain: Chain) -> None:
    base, held = base_of(chain)
    held[5000] ^= 1
    before = bytes(held)
    assert await base.apply_deltas(chain.manifest, chain.receive) is None
    assert len(chain.fetched) == 3
    assert held == before


async def test_a_malformed_link_with_the_right_digest_leaves_the_base_alone(chain: Chain) -> None:
    base, held = base_of(chain)
    manifest = weights_pb2.Manifest()
    manifest.CopyFrom(chain.manifest)
    manifest.deltas[1].buckets[2].CopyFrom(weights_pb2.BucketEntry(nbytes=3, digest=digest_of(b"abc")))

    async def receive(bucket_set: BucketSet) -> VerifiedWeights:
        if bucket_set.policy.version != 2:
            return await chain.receive(bucket_set)
        return VerifiedWeights(memoryview(bytearray(b"abc" * 500)), "grpc", "delta", 0, "", 0, 0)

    assert await base.apply_deltas(manifest, receive) is None
    assert held == chain.first.data.view()


async def test_a_link_that_does_not_come_is_no_error(chain: Chain) -> None:
    base, held = base_of(chain)

    async def receive(bucket_set: BucketSet) -> VerifiedWeights:
        raise WeightsError(f"{bucket_set.name(0)} did not come")

    assert await base.apply_deltas(chain.manifest, receive) is None
    assert held == chain.first.data.view()
