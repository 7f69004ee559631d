"""A rank's answer to the health check, before it can wait for other ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import grpc

from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config import Config
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.service import add_health_and_reflection, advertised_address, set_serving, write_ready_file


def answer_health(config: Config, role: Role, bridge: AsyncBridge, closers: ExitStack, ready_file: Path) -> None:
    """Serves this rank's health to its starter.

    Args:
        config: of the run.
        role: of the rank in the mesh.
        bridge: the event loop.
        closers: end the server.
        ready_file: written once it answers.
    """
    network, security = config.network, config.security

    async def serve() -> tuple[grpc.aio.Server, str]:
        server = new_server(security, Identity(role))
        health = add_health_and_reflection(server, ())
        port = bind(server, network.host, 0, security)
        await server.start()
        await set_serving(health, ())
        return server, advertised_address(network.host, port, network.advertise)

    server, address = bridge.call(serve(), network.rpc_timeout_s)
    closers.callback(lambda: bridge.call(server.stop(None), network.rpc_timeout_s))
    write_ready_file(ready_file, address)
