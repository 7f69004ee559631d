"""A client without TLS, or without a certificate where one is asked for, gets no answer, and waits for none."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, UnreachableError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.service import add_health_and_reflection
from tests.certificates import Authority

_DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """Ours, and another."""
    folder = tmp_path_factory.mktemp("certificates")
    return Authority(folder, "ours"), Authority(folder, "foreign")


@asynccontextmanager
async def serving(security: SecuritySection) -> AsyncIterator[str]:
    server = new_server(security)
    add_health_and_reflection(server, [])
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def address(authorities: tuple[Authority, Authority]) -> AsyncIterator[str]:
    """The address of a service that asks for certificates of our authority."""
    ours, _ = authorities
    cert, key = ours.certify("service")
    async with serving(SecuritySection(tls_cert=cert, tls_key=key, tls_client_ca=ours.pem)) as address:
        yield address


async def _ask(address: str, security: SecuritySection) -> grpc.aio.AioRpcError | None:
    async with open_channel(address, security) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            return error
    return None


async def test_strangers_are_refused_at_once(address: str, authorities: tuple[Authority, Authority]) -> None:
    ours, foreign = authorities
    (cert, key), (foreign_cert, foreign_key) = ours.certify("client"), foreign.certify("stranger")
    strangers = {
        r"may want TLS.*--tls-ca": SecuritySection(),
        r"or a certificate.*--tls-cert": SecuritySection(tls_ca=ours.pem),
        r"a certificate of its authority": SecuritySection(tls_ca=ours.pem, tls_cert=foreign_cert, tls_key=foreign_key),
        r"tls_ca.* has to be the authority": SecuritySection(tls_ca=foreign.pem, tls_cert=cert, tls_key=key),
    }
    for hint, security in strangers.items():
        error = await _ask(address, security)
        assert error is not None
        # Not the deadline: a refused client is told.
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        found = to_rollmesh_error(error, "health")
        assert isinstance(found, UnreachableError)
        assert re.search(hint, found.hint), found
    assert await _ask(address, SecuritySection(tls_ca=ours.pem, tls_cert=cert, tls_key=key)) is None


async def test_hints_tell_apart_why_a_service_is_not_reached(authorities: tuple[Authority, Authority]) -> None:
    ours, _ = authorities
    cert, key = ours.certify("elsewhere", "example.org")
    client = SecuritySection(tls_ca=ours.pem)
    for security, hint in (
        (SecuritySection(), "does not speak TLS"),
        (SecuritySection(tls_cert=cert, tls_key=key), "has to name this address"),
    ):
        async with serving(security) as address:
            error = await _ask(address, client)
            assert error is not None
            assert hint in to_rollmesh_error(error, "health").hint
    error = await _ask(address, client)
    assert error is not None
    assert "is the service running" in to_rollmesh_error(error, "health").hint


def test_half_of_what_tls_needs_is_refused(authorities: tuple[Authority, Authority]) -> None:
    ours, _ = authorities
    cert, key = ours.certify("half")
    for half in ({"tls_cert": cert}, {"tls_key": key}, {"tls_client_ca": ours.pem}):
        with pytest.raises(ValidationError, match="tls_cert"):
            SecuritySection(**half)


async def test_files_that_cannot_be_used_are_named(authorities: tuple[Authority, Authority], tmp_path: Path) -> None:
    ours, foreign = authorities
    (cert, key), (_, foreign_key) = ours.certify("service"), foreign.certify("stranger")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate\n")
    locked = tmp_path / "locked.key"
    password = BestAvailableEncryption(b"a password")
    locked.write_bytes(
        load_pem_private_key(key.read_bytes(), None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, password)
    )
    for wrong in (
        {"tls_cert": cert, "tls_key": locked},
        {"tls_cert": nonsense, "tls_key": key},
        {"tls_cert": cert, "tls_key": nonsense},
        {"tls_cert": cert, "tls_key": foreign_key},
        {"tls_cert": cert, "tls_key": key, "tls_client_ca": nonsense},
    ):
        security = SecuritySection(**wrong)
        with pytest.raises(ConfigError, match=r"security\.tls_"):
            bind(new_server(security), "127.0.0.1", 0, security)
    for wrong in ({"tls_ca": nonsense}, {"tls_cert": cert, "tls_key": foreign_key}):
        with pytest.raises(ConfigError, match=r"security\.tls_"):
            open_channel("127.0.0.1:9", SecuritySection(**wrong))
