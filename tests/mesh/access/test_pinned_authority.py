"""A caller that knows only the fingerprint of a mesh's authority."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.mesh.access.certificates import fingerprint_of
from rollmesh.mesh.access.pinned_authority import fetch_authority
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import UnauthenticatedError, UnreachableError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.service import add_health_and_reflection
from tests.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def front(authority: Authority) -> AsyncIterator[str]:
    """A service that asks for its callers' certificates too."""
    cert, key = authority.certify("front")
    security = SecuritySection(tls_cert=cert, tls_key=key, tls_client_ca=authority.pem)
    server = new_server(security)
    add_health_and_reflection(server, [])
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def _fetch(addresses: list[str], fingerprint: bytes) -> bytes:
    return await asyncio.to_thread(partial(fetch_authority, addresses, fingerprint, retry_s=0.0))


async def test_the_pinned_authority_verifies_the_mesh(authority: Authority, front: str, tmp_path: Path) -> None:
    """The first front is away; the second shows its authority even to a caller that has no certificate yet."""
    with socket.create_server(("127.0.0.1", 0)) as away:
        nowhere = f"127.0.0.1:{away.getsockname()[1]}"
    pem = await _fetch([nowhere, front], fingerprint_of(authority.pem.read_bytes(), "authority"))
    ca = tmp_path / "ca.pem"
    ca.write_bytes(pem)
    cert, key = authority.certify("caller")
    async with open_channel(front, SecuritySection(tls_ca=ca, tls_cert=cert, tls_key=key)) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_another_authority_is_refused_at_once(front: str, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with pytest.raises(UnauthenticatedError, match="does not show the certificate authority") as caught:
        await _fetch([front], fingerprint_of(other.pem.read_bytes(), "other"))
    assert "tls_cert" in caught.value.hint


async def test_a_mesh_without_tls_is_not_believed() -> None:
    server = new_server(SecuritySection())
    port = bind(server, "127.0.0.1", 0, SecuritySection())
    await server.start()
    with pytest.raises(UnreachableError, match="no front answers with TLS"):
        await _fetch([f"127.0.0.1:{port}"], bytes(32))
    await server.stop(None)
