"""The answer of a service to the doctor: its clock, and those of its peers that it reaches.

Invariants: a request brings no addresses. The peers that are called are those of the mesh and of the service's own
configuration. At most `MOST_PEERS` are called, a few at a time, each within a deadline. One request is answered at a
time, so that asking costs the mesh little, however many members there are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.protos import diagnosis_pb2, diagnosis_pb2_grpc, membership_pb2

SERVICE_NAME = diagnosis_pb2.DESCRIPTOR.services_by_name["Diagnosis"].full_name
MOST_PEERS = 64
_AT_ONCE = 16
_CALL_S = 3.0
_LIST_S = 5.0


class Peer(NamedTuple):
    """A service that another one calls."""

    role: membership_pb2.Role
    address: str
    # Opens a channel as the caller does in its work.
    connect: Callable[[], grpc.aio.Channel]


Peers = Callable[[], Awaitable[Sequence[Peer]]]
RedisClock = Callable[[], Awaitable[int]]


async def no_peers() -> Sequence[Peer]:
    """A service that calls none but the mesh's fronts has none."""
    return ()


def peers_of(
    agent: MembershipAgent, security: SecuritySection, identity: Identity, *roles: membership_pb2.Role
) -> Peers:
    """The members of some roles, with the caller's credentials and TLS.

    Args:
        agent: of the caller.
        security, identity: of the caller.
        roles: that it calls.
    """

    async def listed() -> Sequence[Peer]:
        async with asyncio.timeout(_LIST_S):
            members = await agent.members()
        called = [member for role in roles for member in members if member.role == role and member.address]
        return [Peer(m.role, m.address, partial(open_channel, m.address, security, identity)) for m in called]

    return listed


class DiagnosisServicer(diagnosis_pb2_grpc.DiagnosisServicer):
    """Serves the Diagnosis contract.

    Args:
        peers: lists the services that this one calls.
        redis_clock: asks Redis for its time, in Unix milliseconds; None: this service does not talk to it.
        config_json: the run's configuration, as members receive it; empty from services other than fronts.
    """

    def __init__(
        self, peers: Peers = no_peers, *, redis_clock: RedisClock | None = None, config_json: str = ""
    ) -> None:
        self._peers = peers
        self._redis_clock = redis_clock
        self._config_json = config_json
        self._turn = asyncio.Lock()

    async def Examine(self, request: diagnosis_pb2.ExamineRequest, _context: Any) -> diagnosis_pb2.ExamineResponse:
        """See diagnosis.proto."""
        answer = diagnosis_pb2.ExamineResponse(unix_ms=_now_ms())
        if self._redis_clock is not None:
            answer.redis_unix_ms = await self._redis_clock()
        if request.peers:
            answer.run_config_json = self._config_json
            async with self._turn:
                answer.peers.extend(await call_peers((await self._peers())[:MOST_PEERS]))
        return answer


async def call_peers(peers: Sequence[Peer]) -> list[diagnosis_pb2.PeerReach]:
    """Calls the health of each peer.

    Args:
        peers: to be called.
    """
    room = asyncio.Semaphore(_AT_ONCE)

    async def bounded(peer: Peer) -> diagnosis_pb2.PeerReach:
        async with room:
            return await _call(peer)

    return await asyncio.gather(*map(bounded, peers))


async def _call(peer: Peer) -> diagnosis_pb2.PeerReach:
    reach = diagnosis_pb2.PeerReach(role=peer.role, address=peer.address)
    began = time.monotonic()
    channel = peer.connect()
    try:
        # Its types do not know the methods.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        # Any other status is an answer: servers of others may have no health service.
        if is_transient(error):
            reach.error = str(to_rollmesh_error(error, peer.address))
    finally:
        await channel.close()
    reach.milliseconds = 1000 * (time.monotonic() - began)
    return reach


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
