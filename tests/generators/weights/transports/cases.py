"""The transports under contract; one entry each."""

from __future__ import annotations

from pathlib import Path

from rollmesh.generators.weights.transports.broadcast import Broadcast
from rollmesh.generators.weights.transports.disk import Disk
from rollmesh.generators.weights.transports.grpc_transport import GrpcTransport
from rollmesh.generators.weights.transports.shm import SharedMemory
from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.learner.weights import transports as learner_offers
from rollmesh.learner.weights.transports import SenderTransport
from rollmesh.mesh.config.network import NetworkSection
from rollmesh.mesh.runtime.hosts import host_id
from tests.generators.weights.transports.world import RUN, SECURITY, Case, default_publisher


def _offering(folder: Path, bucket_bytes: int, *offers: SenderTransport) -> WeightPublisher:
    return WeightPublisher(
        RUN, {"config.json": b"{}"}, PublishRules(bucket_bytes=bucket_bytes), directory=folder, offers=offers
    )


def _over_gloo(folder: Path, bucket_bytes: int) -> WeightPublisher:
    rendezvous = learner_offers.Rendezvous(NetworkSection(), SECURITY)
    broadcast = learner_offers.Broadcast("gloo", rendezvous, timeout_s=5.0, window_s=0.1)
    return _offering(folder, bucket_bytes, broadcast)


def _over_nccl(folder: Path, bucket_bytes: int) -> WeightPublisher:
    rendezvous = learner_offers.Rendezvous(NetworkSection(), SECURITY)
    return _offering(folder, bucket_bytes, learner_offers.Broadcast("nccl", rendezvous, timeout_s=20.0))


def _on_disk(folder: Path, bucket_bytes: int) -> WeightPublisher:
    return _offering(folder, bucket_bytes, learner_offers.Disk(folder, RUN))


CASES: list[Case] = [
    Case("shm", lambda folder: SharedMemory(host_id(), folder), default_publisher, needs_publisher=False),
    Case("grpc", lambda _: GrpcTransport(), default_publisher),
    Case("gloo", lambda _: Broadcast("gloo"), _over_gloo),
    Case("disk", Disk, _on_disk, needs_publisher=False),
]
# It needs a learner in another process, on another device.
NCCL = Case("nccl", lambda _: Broadcast("nccl"), _over_nccl)
