"""Processes of a role with tokens and TLS: who does not have both is told so, with the role's name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.algorithms.types import ModelRole
from rollmesh.learner.role_service.servicer import RoleServicer
from rollmesh.learner.roles.client import RoleClient, RoleLimits
from rollmesh.mesh.access.roles import Identity, Role, new_identity
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import PermissionDeniedError, RoleLostError, UnauthenticatedError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.protos import role_pb2, role_pb2_grpc
from tests.certificates import Authority
from tests.secrets_here import write_secret

CRITIC = ModelRole("critic", kind="value_model")
LIMITS = RoleLimits(silence_s=240.0, away_s=0.5, call_s=240.0)


class Ranks:
    """Have done whatever is asked of them."""

    @property
    def written(self) -> Future[None]:
        return self.submit("")

    def submit(self, _order: str, **_arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        return done


@asynccontextmanager
async def served(security: SecuritySection) -> AsyncIterator[str]:
    server = new_server(security)
    description = role_pb2.DescribeRoleResponse(role=CRITIC.name, kind=CRITIC.kind, trained=CRITIC.trained)
    role_pb2_grpc.add_RoleModelServicer_to_server(RoleServicer(description, Ranks(), most_bytes=1), server)
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def attach(address: str, security: SecuritySection, identity: Identity | None) -> None:
    """Begins a session as a learner does."""

    async def find() -> Sequence[str]:
        return [address]

    client = RoleClient(CRITIC, {}, find, lambda at: open_channel(at, security, identity), LIMITS)
    try:
        await client.attach(1)
    finally:
        await client.close()


@pytest.fixture
def secured(tmp_path: Path) -> SecuritySection:
    authority = Authority(tmp_path)
    cert, key = authority.certify("node")
    return SecuritySection(
        token_file=write_secret(tmp_path / "token"), tls_cert=cert, tls_key=key, tls_ca=authority.pem
    )


async def test_a_learner_with_token_and_tls_is_answered(secured: SecuritySection) -> None:
    async with served(secured) as address:
        await attach(address, secured, new_identity(Role.LEARNER))


async def test_another_token_is_refused_at_once(secured: SecuritySection, tmp_path: Path) -> None:
    foreign = write_secret(tmp_path / "foreign", "the token of another mesh, which is long enough")
    async with served(secured) as address:
        with pytest.raises(UnauthenticatedError, match=rf"role critic at {address}: ") as refused:
            await attach(address, secured.model_copy(update={"token_file": foreign}), new_identity(Role.LEARNER))
        assert refused.value.hint
        with pytest.raises(UnauthenticatedError, match=rf"role critic at {address}: "):
            await attach(address, secured.model_copy(update={"token_file": None}), None)


async def test_another_kind_of_member_is_refused_at_once(secured: SecuritySection) -> None:
    async with served(secured) as address:
        with pytest.raises(PermissionDeniedError, match=rf"role critic at {address}: "):
            await attach(address, secured, new_identity(Role.GENERATOR))


async def test_one_side_without_tls_is_named(secured: SecuritySection) -> None:
    plain = SecuritySection(token_file=secured.token_file)
    async with served(plain) as address:
        with pytest.raises(RoleLostError, match=rf"role critic .*{address}: .*it does not speak TLS"):
            await attach(address, secured, new_identity(Role.LEARNER))
    async with served(secured) as address:
        with pytest.raises(RoleLostError, match=rf"role critic .*{address}: .*it may want TLS"):
            await attach(address, plain, new_identity(Role.LEARNER))
