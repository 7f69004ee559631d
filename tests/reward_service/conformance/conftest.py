"""Servers in this process, and checks of them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health, health_pb2_grpc

from rollmesh.protos import reward_pb2_grpc
from rollmesh.reward_service.conformance.check import check
from rollmesh.reward_service.conformance.findings import Report
from rollmesh.reward_service.conformance.opening import open_transport
from rollmesh.reward_service.conformance.session import Options
from rollmesh.reward_service.samples import builtin_items
from tests.reward_service.conformance.servers import Server

Serve = Callable[[Server], Awaitable[str]]


@pytest_asyncio.fixture
async def serving() -> AsyncIterator[Serve]:
    """Starts a server and gives its address."""
    started: list[grpc.aio.Server] = []

    async def start(servicer: Server) -> str:
        limit = [("grpc.max_receive_message_length", servicer.max_message)]
        server = grpc.aio.server(options=[*limit, ("grpc.so_reuseport", 0)])
        reward_pb2_grpc.add_RewardServicer_to_server(servicer, server)
        if servicer.status is not None:
            alive = health.aio.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(alive, server)
            await alive.set("", servicer.status)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        started.append(server)
        return f"grpc://127.0.0.1:{port}"

    yield start
    for server in started:
        await server.stop(0)


@pytest.fixture(autouse=True)
def _short_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One repetition tells that a figure is measured."""
    monkeypatch.setattr("rollmesh.reward_service.conformance.probes.load._RATE_S", 0.0)


Check = Callable[..., Awaitable[Report]]


@pytest.fixture
def checked() -> Check:
    """Checks an address: `await checked(address, "identity", timeout_s=...)` runs the probes of that name."""

    async def run(address: str, *only: str, samples: Any = None, key: str = "", **options: Any) -> Report:
        transport = open_transport(address, key=key)
        try:
            chosen = Options(only=only, **({"timeout_s": 60.0} | options))
            return await check(address, transport, samples or builtin_items(), chosen)
        finally:
            await transport.close()

    return run


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that no other process is given; gRPC's servers share it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
