"""Transports that make published versions available in addition to the Weights service: one module each.

A learner makes those that `weights.transport` names. `auto` makes those that cost nothing: shared memory, into which
versions are written anyhow. All others cost time or disk for every version, and are made when asked for.
"""

from __future__ import annotations

from rollmesh.learner.weights.transports.broadcast import Broadcast
from rollmesh.learner.weights.transports.disk import Disk
from rollmesh.learner.weights.transports.interface import SenderTransport
from rollmesh.learner.weights.transports.rendezvous import Rendezvous
from rollmesh.learner.weights.transports.shm import SharedMemory, shared_memory
from rollmesh.mesh.config import Config

__all__ = [
    "Broadcast",
    "Disk",
    "Rendezvous",
    "SenderTransport",
    "SharedMemory",
    "configured_transports",
    "shared_memory",
]


def configured_transports(config: Config) -> list[SenderTransport]:
    """The transports other than shared memory, which belongs to the publisher's own bytes.

    Raises:
        WeightsError, ConfigError: a requested transport is not possible here.
    """
    weights = config.weights
    match weights.transport:
        case "disk":
            assert weights.dir is not None, "checked with the configuration"
            return [Disk(weights.dir, config.run.name)]
        case "gloo" | "nccl":
            rendezvous = Rendezvous(config.network, config.security)
            return [Broadcast(weights.transport, rendezvous, timeout_s=weights.timeout_s)]
        case _:
            return []
