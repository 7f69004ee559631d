"""The chain of deltas, and when receivers hear of a version: contiguous, bounded, off the training thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollmesh.learner.weights.delta_chain as chain_module
from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.learner.weights.announcement_stream import AnnouncementStream, delta_wait_s
from rollmesh.learner.weights.delta_chain import DeltaChain
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import bucket_starts
from rollmesh.mesh.weights.delta import apply_bucket, spans_of
from rollmesh.protos import weights_pb2

DEADLINE_S = 240.0


class Encoder:
    """Holds encodings until they are let go."""

    def __init__(self, encode: Any) -> None:
        self._encode = encode
        self.free = threading.Event()
        self.begun = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.free.set()

    def __call__(self, *arguments: Any) -> bytes:
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.free.wait(DEADLINE_S)
        encoded: bytes = self._encode(*arguments)
        return encoded


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoder]:
    encoder = Encoder(chain_module.encode_bucket)
    monkeypatch.setattr(chain_module, "encode_bucket", encoder)
    yield encoder
    encoder.free.set()


class Published:
    """A publisher, and what it published."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        settings = {"transport": "grpc", "encoding": "delta", "bucket_bytes": 8000, **settings}
        self.publisher = WeightPublisher("run", {}, PublishRules(**settings), directory=folder)
        self.told = threading.Semaphore(0)
        self.publisher.subscribe(self.told.release)
        self.manifests: list[weights_pb2.Manifest] = []
        self.tensors = {f"t{i}": torch.zeros(3000, dtype=torch.float32) for i in range(3)}

    @property
    def chain(self) -> DeltaChain:
        assert self.publisher.chain is not None
        return self.publisher.chain

    def publish(self, *, rows: int = 3000, incarnation: int = 1) -> weights_pb2.Manifest:
        """A version in which a few elements of the second tensor differ from the last one's."""
        version = len(self.manifests)
        self.tensors["t1"] = self.tensors["t1"].clone()
        self.tensors["t1"][version * 7 : version * 7 + 20] += 1.0
        tensors = {**self.tensors, "t0": self.tensors["t0"][:rows]}
        self.manifests.append(
            self.publisher.publish(PolicyVersion(incarnation, version), tensors.items(), torch.bfloat16)
        )
        assert self.told.acquire(timeout=DEADLINE_S)
        return self.manifests[-1]

    def wait(self) -> None:
        """Until the encoding that runs is done."""
        assert self.told.acquire(timeout=DEADLINE_S)

    def links(self, version: int = -1) -> list[tuple[int, int]]:
        found = self.chain.links_to(self.manifests[version].digest)
        return [(link.base.version, link.policy.version) for link in found]


@pytest.fixture
def published(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Published]:
    published = Published(tmp_path, **getattr(request, "param", {}))
    yield published
    published.publisher.close()


def test_links_lead_bit_for_bit_from_version_to_version(published: Published) -> None:
    published.publish()
    held = bytearray(published.publisher.version(PolicyVersion(1, 0)).data.view())
    for version in range(1, 4):
        published.publish()
        published.wait()
        manifest = published.publisher.with_links(published.manifests[-1])
        delta = manifest.deltas[-1]
        assert delta.base_digest == published.manifests[-2].digest
        assert delta.digest == manifest.digest
        spans = spans_of(manifest.tensors, len(manifest.buckets))
        assert len(spans) > 1
        for index, (start, of_bucket) in enumerate(zip(bucket_starts(manifest.buckets), spans, strict=False)):
            data = published.publisher.bucket(PolicyVersion(1, version), index, PolicyVersion(1, version - 1))
            assert len(data) == delta.buckets[index].nbytes
            apply_bucket(data, memoryview(held)[start : start + manifest.buckets[index].nbytes], of_bucket)
        assert held == published.publisher.version(PolicyVersion(1, version)).data.view()


@pytest.mark.parametrize("published", [{"chain": 3}], indirect=True)
def test_the_chain_is_bounded(published: Published) -> None:
    published.publish()
    for _ in range(5):
        published.publish()
        published.wait()
    assert published.links() == [(2, 3), (3, 4), (4, 5)]
    with pytest.raises(WeightsError, match="no delta from 1:1 to 1:2 is kept"):
        published.publisher.bucket(PolicyVersion(1, 2), 0, PolicyVersion(1, 1))
    with pytest.raises(WeightsError, match="bucket 9 does not exist"):
        published.publisher.bucket(PolicyVersion(1, 5), 9, PolicyVersion(1, 4))


def test_publishing_does_not_wait_for_encoding_and_skips_what_it_cannot_follow(
    published: Published, encoder: Encoder
) -> None:
    published.publish()
    encoder.free.clear()
    published.publish()
    assert encoder.begun.acquire(timeout=DEADLINE_S)
    published.publish()
    published.publish()
    # Only two versions are kept, and nothing is encoded yet; what the next link begins at is there all the same.
    encoder.free.set()
    published.wait()
    published.wait()
    assert published.links() == [(0, 1), (1, 3)]
    assert threading.current_thread().name not in encoder.threads
    assert published.publisher.version(PolicyVersion(1, 3)).policy.version == 3


def test_another_layout_begins_anew(published: Published) -> None:
    published.publish()
    published.publish()
    published.wait()
    published.publish(rows=2999)
    published.wait()
    assert published.links() == []
    published.publish(rows=2999)
    published.wait()
    assert published.links() == [(2, 3)]


def test_a_link_that_saves_nothing_is_not_kept(published: Published) -> None:
    published.publish()
    for name in published.tensors:
        published.tensors[name] = torch.randint(-(2**15), 2**15, (3000,), dtype=torch.int16).view(torch.bfloat16)
    published.publish()
    published.wait()
    assert published.links() == []
    assert published.chain.share == 1.0


def test_a_failed_encoding_leaves_the_full_bytes(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise MemoryError

    published.publish()
    with monkeypatch.context() as patch:
        patch.setattr(chain_module, "encode_bucket", fail)
        published.publish()
        published.wait()
    assert published.links() == []
    published.publish()
    published.wait()
    assert published.links() == [(1, 2)]


@pytest.mark.parametrize("published", [{"encoding": "auto", "chain": 2}], indirect=True)
def test_auto_encodes_on_demand_and_forgets_what_no_one_wants(published: Published, encoder: Encoder) -> None:
    published.publish()
    published.publish()
    assert not encoder.begun.acquire(blocking=False)
    published.chain.request_link()
    published.wait()
    assert published.links() == [(0, 1)]
    for _ in range(4):
        published.publish()
    assert published.chain.tip is None
    published.chain.request_link()
    published.wait()
    assert published.links() == [(4, 5)]


@pytest.mark.parametrize("published", [{"encoding": "full"}], indirect=True)
def test_full_makes_no_deltas(published: Published) -> None:
    published.publish()
    assert published.publisher.chain is None
    assert not published.publisher.with_links(published.publish()).deltas
    with pytest.raises(WeightsError, match=r"weights\.encoding is full"):
        published.publisher.bucket(PolicyVersion(1, 1), 0, PolicyVersion(1, 0))


# ------------------------------------------------------------------------------------------------------------ watching


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watcher(published: Published, clock: Clock | None = None, host: str = "elsewhere") -> AnnouncementStream:
    request = weights_pb2.WatchRequest(member_id="gen-1", host_id=host)
    return AnnouncementStream(published.publisher, request, clock or Clock())


def told(found: tuple[weights_pb2.Manifest | None, float | None]) -> tuple[int, list[tuple[int, int]]]:
    """Version announced, and its links."""
    assert found[0] is not None
    return found[0].policy.version, [(d.base.version, d.policy.version) for d in found[0].deltas]


def test_a_stream_begins_at_once_and_then_waits_for_links(published: Published, encoder: Encoder) -> None:
    stream = watcher(published)
    assert stream.next() == (None, None)
    published.publish()
    assert told(stream.next()) == (0, [])
    assert stream.next() == (None, None)
    encoder.free.clear()
    published.publish()
    assert stream.next() == (None, None)
    assert told(watcher(published).next()) == (1, [])
    encoder.free.set()
    published.wait()
    assert told(stream.next()) == (1, [(0, 1)])
    assert told(watcher(published).next()) == (1, [(0, 1)])


def test_a_stream_follows_an_encoder_that_is_behind(published: Published, encoder: Encoder) -> None:
    stream = watcher(published)
    published.publish()
    stream.next()
    encoder.free.clear()
    for _ in range(3):
        published.publish()
    assert stream.next() == (None, None)
    encoder.free.set()
    published.wait()
    published.wait()
    assert told(stream.next()) == (3, [(0, 1), (1, 3)])
    assert stream.next() == (None, None)


def test_no_one_waits_for_a_link_that_does_not_begin_at_what_it_has(published: Published, encoder: Encoder) -> None:
    published.publish()
    encoder.free.clear()
    published.publish()
    stream = watcher(published)
    assert told(stream.next()) == (1, [])
    late = watcher(published)
    published.publish()
    assert told(late.next()) == (2, [])
    # 0 to 1 is being encoded, then comes 1 to 2: worth waiting for.
    assert stream.next() == (None, None)
    published.publish()
    # The next link leads from 1 to 3: of no use to one that has 2.
    assert told(late.next()) == (3, [])
    encoder.free.set()
    published.wait()
    published.wait()
    assert told(stream.next()) == (3, [(0, 1), (1, 3)])


@pytest.mark.parametrize("published", [{"encoding": "auto"}], indirect=True)
def test_auto_waits_no_longer_than_it_can_save(
    published: Published, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    stream = watcher(published, clock)
    published.publish()
    stream.next()
    published.publish()
    # Nothing is known of the receiver's network: all bytes, at once.
    assert told(stream.next()) == (1, [])
    assert not encoder.begun.acquire(blocking=False)
    full = sum(bucket.nbytes for bucket in published.manifests[-1].buckets)
    monkeypatch.setattr(published.publisher.pushes, "bytes_per_s", lambda _: full / 10)
    encoder.free.clear()
    published.publish()
    manifest, wait_s = stream.next()
    assert manifest is None
    assert wait_s == pytest.approx(10 * (1 - published.chain.share))
    clock.now += 4
    published.publish()
    manifest, wait_s = stream.next()
    assert manifest is None
    assert wait_s == pytest.approx(10 * (1 - published.chain.share) - 4)
    clock.now += 6
    assert told(stream.next()) == (3, [])
    encoder.free.set()


@pytest.mark.parametrize("published", [{"encoding": "auto", "transport": "auto"}], indirect=True)
def test_auto_makes_no_links_for_those_who_share_memory(
    published: Published, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published.publisher.pushes, "bytes_per_s", lambda _: 1.0)
    here = published.publish().offers[0].host_id
    stream = watcher(published, host=here)
    stream.next()
    published.publish()
    assert told(stream.next()) == (1, [])
    assert not encoder.begun.acquire(blocking=False)


def test_patience_is_what_can_be_saved() -> None:
    slow = delta_wait_s(10**9, share=0.01, encoded_bytes_per_s=1e9, received_bytes_per_s=125e6)
    assert slow == pytest.approx(8 * 0.99)
    assert delta_wait_s(10**9, share=0.01, encoded_bytes_per_s=1e9, received_bytes_per_s=3e9) == 0.0
    assert delta_wait_s(10**9, share=1.0, encoded_bytes_per_s=math.inf, received_bytes_per_s=1.0) == 0.0


def test_the_network_is_known_from_full_transfers_over_it(published: Published) -> None:
    pushes = published.publisher.pushes
    report = {"member_id": "gen-1", "transport": "grpc", "encoding": "full", "bytes": 1000}
    assert pushes.bytes_per_s("gen-1") is None
    pushes.add(weights_pb2.SwapReport(last_byte_us=2000, **report))  # type: ignore[arg-type]
    pushes.add(weights_pb2.SwapReport(last_byte_us=1000, **report))  # type: ignore[arg-type]
    for other in ({"encoding": "delta"}, {"transport": "shm"}, {"error": "x"}):
        pushes.add(weights_pb2.SwapReport(last_byte_us=1, **{**report, **other}))  # type: ignore[arg-type]
    assert pushes.bytes_per_s("gen-1") == pytest.approx(1e6)
