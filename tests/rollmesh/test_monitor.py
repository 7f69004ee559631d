"""A look at a mesh of several fronts, some of which are gone."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rollmesh.launcher.mesh_client import MeshClient
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.protos import membership_pb2, membership_pb2_grpc

OPEN = SecuritySection()
# Channels begin with a front of their own choice.
LOOKS = 12


class OneMember(membership_pb2_grpc.MembershipServicer):
    """A front that lists a single member."""

    async def List(self, request: Any, context: Any) -> membership_pb2.ListResponse:
        return membership_pb2.ListResponse(members=[membership_pb2.Member(member_id="one")])


@pytest.fixture
async def alive() -> AsyncIterator[str]:
    server = new_server(OPEN)
    membership_pb2_grpc.add_MembershipServicer_to_server(OneMember(), server)
    port = bind(server, "127.0.0.1", 0, OPEN)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
def gone() -> Iterator[str]:
    """An address without a listener, where none will come."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_a_front_that_is_gone_hides_nothing(alive: str, gone: str) -> None:
    for _ in range(LOOKS):
        async with MeshClient(f"{gone},{alive}", OPEN) as view:
            assert [member.member_id for member in (await view.members()).members] == ["one"]


async def test_where_no_front_answers_that_is_said(gone: str) -> None:
    async with MeshClient(gone, OPEN) as view:
        with pytest.raises(UnreachableError, match=f"mesh {gone}"):
            await view.members()
