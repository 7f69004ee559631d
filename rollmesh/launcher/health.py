"""The health of a service, from the standard gRPC health service."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.mesh.addresses import split_address
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.liveness.watchdog import ProbeAnswer
from rollmesh.mesh.rpc.channel import open_channel

# A connection that died without a word is replaced within half a minute; one to a service that is merely slow stays.
_KEEPALIVE_S = 15.0
# Statuses of this side, or of the network. Any other status comes from the service.
_NO_ANSWER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


class HealthProbe:
    """Asks one service, over one connection.

    Args:
        address: of the service.
        security: how to reach it.
    """

    def __init__(self, address: str, security: SecuritySection) -> None:
        self._address = address
        self._channel = open_channel(address, security, keepalive_s=_KEEPALIVE_S)
        self._stub: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> HealthProbe:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._channel.close()

    async def until_serving(self, deadline_s: float) -> None:
        """Waits for the first answer.

        Raises:
            UnreachableError: no answer within the deadline, or not serving.
        """
        try:
            answer: health_pb2.HealthCheckResponse = await self._stub.Check(
                health_pb2.HealthCheckRequest(), timeout=deadline_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            text = f"{self._address} does not answer the health check: {error.details()}"
            raise UnreachableError(text) from error
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise UnreachableError(f"{self._address} is up but not serving")

    async def ask(self) -> ProbeAnswer:
        """Asks once, without a deadline; every reply of the service is an answer."""
        try:
            await self._stub.Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NO_ANSWER:
                return ProbeAnswer.WELL
            return ProbeAnswer.PORT_CLOSED if await self._refuses() else ProbeAnswer.NONE
        return ProbeAnswer.WELL

    async def _refuses(self) -> bool:
        """True where nothing listens at the address."""
        host, port = split_address(self._address)
        try:
            _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        writer.close()
        return False
