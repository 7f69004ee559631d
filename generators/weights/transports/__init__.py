"""Transports of weights to this generator: one module for each, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollmesh.generators.weights.transports.broadcast import Broadcast
from rollmesh.generators.weights.transports.disk import Disk
from rollmesh.generators.weights.transports.grpc_transport import GrpcTransport
from rollmesh.generators.weights.transports.interface import Received, Transfer, Transport
from rollmesh.generators.weights.transports.shm import SharedMemory
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.shared_files import SHARED_MEMORY

__all__ = ["Received", "Transfer", "Transport", "choose", "transports"]


def transports(
    host_id: str,
    *,
    shared: Path = SHARED_MEMORY,
    folder: Path | None = None,
    streams: int = 2,
    security: SecuritySection | None = None,
) -> list[Transport]:
    """All transports, the cheapest first; the last one works everywhere.

    Args:
        host_id: of this process (`mesh.runtime.hosts`).
        shared: the tmpfs in which publishers of this host have their files.
        folder: `weights.dir`.
        streams: `weights.streams`.
        security: token and TLS of the mesh.
    """
    grpc = GrpcTransport(streams=streams, security=security)
    return [SharedMemory(host_id, shared), Broadcast("nccl"), Broadcast("gloo"), Disk(folder), grpc]


def choose(available: Sequence[Transport], setting: str, bucket_set: BucketSet) -> list[Transport]:
    """The transports to be tried for these bytes, in this order.

    Args:
        available: the cheapest first.
        setting: `weights.transport`: a name, or `auto`.
        bucket_set: the bytes.

    Raises:
        WeightsError: the one that is asked for cannot bring them, and allows no other.
    """
    if setting == "auto":
        return [transport for transport in available if not transport.refusal(bucket_set)]
    chosen = next(transport for transport in available if transport.name == setting)
    why = chosen.refusal(bucket_set)
    if not chosen.alone:
        return [*([] if why else [chosen]), available[-1]]
    if why:
        raise WeightsError(f"weights.transport is {setting}, but {why}", hint="set weights.transport: auto")
    return [chosen]
