"""Common parts of a learner and a generator of the matrix, and their reports to the driver."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import grpc

from rollmesh.buffer.client.client import BufferClient
from rollmesh.mesh.addresses import addresses_of
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.failover_channel import FailoverChannel
from rollmesh.protos import membership_pb2

# Longest absence that is put on a run, many times over: no one gives up meanwhile.
PATIENCE_S = 60.0
# A peer that is silent for so long, and 0.8 times as long again, counts as gone.
_KEEPALIVE_S = 1.0


def say(run: str, event: str, **facts: Any) -> None:
    """Tells the driver."""
    sys.stdout.write(json.dumps({"run": run, "event": event, **facts}) + "\n")
    sys.stdout.flush()


class _GivenFronts(FailoverChannel):
    """Stays with the links that it was given; what fronts list is where they are without a link between."""

    def set_fronts(self, addresses: Iterable[str]) -> None:
        pass


def _open(address: str, _keepalive_s: float) -> grpc.aio.Channel:
    return open_channel(address, SecuritySection(), keepalive_s=_KEEPALIVE_S)


class Member:
    """Common parts of a learner and a generator: a channel to the fronts, a client, heartbeats."""

    def __init__(self, mesh: str, role: membership_pb2.Role, name: str) -> None:
        channel = _GivenFronts(addresses_of(mesh), _open, credentials=None)
        self.client = BufferClient(channel, timeout_s=2.0, retry_s=PATIENCE_S)
        self.agent = MembershipAgent(
            channel, role, member_id=name, address="127.0.0.1:1", host_id="test", timeout_s=2.0, retry_s=PATIENCE_S
        )
