"""The answers of services to the doctor: their clock, and the peers that they reach."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.diagnosis import MOST_PEERS, DiagnosisServicer, Peer, Peers
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.service import add_health_and_reflection
from rollmesh.protos import diagnosis_pb2, diagnosis_pb2_grpc, membership_pb2

_DEADLINE_S = 60.0
_REWARD = membership_pb2.ROLE_REWARD


@asynccontextmanager
async def serving(servicer: DiagnosisServicer) -> AsyncIterator[str]:
    """The address of a service with this servicer, and with a health service."""
    server = new_server(SecuritySection())
    diagnosis_pb2_grpc.add_DiagnosisServicer_to_server(servicer, server)
    add_health_and_reflection(server, [])
    port = bind(server, "127.0.0.1", 0, SecuritySection())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def peer(address: str) -> Peer:
    return Peer(_REWARD, address, lambda: open_channel(address, SecuritySection()))


def these(*peers: Peer) -> Peers:
    async def listed() -> Sequence[Peer]:
        return peers

    return listed


async def examine(address: str, *, peers: bool) -> diagnosis_pb2.ExamineResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = diagnosis_pb2_grpc.DiagnosisStub(channel)
        return await stub.Examine(diagnosis_pb2.ExamineRequest(peers=peers), timeout=_DEADLINE_S)


async def test_the_clocks_are_those_of_the_service_and_of_redis() -> None:
    async def redis() -> int:
        return 7

    before = time.time()
    async with serving(DiagnosisServicer(redis_clock=redis, config_json="{}")) as address:
        answer = await examine(address, peers=False)
    assert before - 1 <= answer.unix_ms / 1000 <= time.time() + 1
    assert answer.redis_unix_ms == 7
    assert (answer.run_config_json, list(answer.peers)) == ("", []), "it answers at once, and with little"


async def test_peers_that_answer_and_peers_that_do_not() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        async with serving(DiagnosisServicer()) as open_one:
            servicer = DiagnosisServicer(these(peer(open_one), peer(closed)), config_json='{"a": 1}')
            async with serving(servicer) as address:
                answer = await examine(address, peers=True)
    reached, missed = answer.peers
    assert (reached.address, reached.error) == (open_one, "")
    assert reached.milliseconds > 0
    assert missed.address == closed
    assert "is the service running" in missed.error
    assert answer.run_config_json == '{"a": 1}'


async def test_of_many_peers_the_first_ones_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    async def call(one: Peer) -> diagnosis_pb2.PeerReach:
        called.append(one.address)
        return diagnosis_pb2.PeerReach(address=one.address)

    monkeypatch.setattr("rollmesh.mesh.diagnosis._call", call)
    servicer = DiagnosisServicer(these(*(peer(f"host-{number}:1") for number in range(10 * MOST_PEERS))))
    answer = await servicer.Examine(diagnosis_pb2.ExamineRequest(peers=True), None)
    assert len(answer.peers) == len(called) == MOST_PEERS
