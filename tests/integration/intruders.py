"""Everyone who must not get in, at every verb of a mesh that runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollmesh.mesh.access.permissions import VERBS, contract_of
from rollmesh.mesh.access.roles import Role, new_identity
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.membership import PROTOCOL
from rollmesh.mesh.private_files import read_secret
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.protos import membership_pb2, membership_pb2_grpc
from tests.mesh.access.verbs import attempts

_DEADLINE_S = 120.0


def audit_intruders(front: str, token_file: Path) -> None:
    """Each is refused with the right status by each service that serves the verb, and none becomes a member.

    Args:
        front: address of the mesh.
        token_file: of the mesh.
    """
    asyncio.run(_audit(front, SecuritySection(token_file=token_file)))


def answer_to_a_member(front: str, token_file: Path) -> str:
    """The answer to a generator that joins; it leaves at once.

    Args:
        front, token_file: see `audit_intruders`.
    """
    return asyncio.run(_join(front, SecuritySection(token_file=token_file)))


async def _join(front: str, security: SecuritySection) -> str:
    who = new_identity(Role.GENERATOR)
    async with open_channel(front, security, who) as channel:
        stub = membership_pb2_grpc.MembershipStub(channel)
        me, role = who.member_id, membership_pb2.ROLE_GENERATOR
        joining = membership_pb2.JoinRequest(member_id=me, role=role, protocol=PROTOCOL)
        answer = await stub.Join(joining, timeout=_DEADLINE_S)
        leaving = membership_pb2.LeaveRequest(member_id=me, generation=answer.generation)
        await stub.Leave(leaving, timeout=_DEADLINE_S)
    assert "elsewhere" in answer.run_config_json
    return str(answer)


async def _audit(front: str, security: SecuritySection) -> None:
    assert security.token_file is not None
    before = await _members(front, security)
    serving = await _serving({front, *before.values()} - {""}, security)
    # The run has no role with processes of its own.
    assert serving.keys() == {contract_of(path) for path in VERBS} - {"rollmesh.v1.RoleModel"}
    tried = [
        attempt
        for attempt in attempts(read_secret(security.token_file, "token_file"))
        if contract_of(attempt.verb.path) in serving
    ]
    for address in sorted(set().union(*serving.values())):
        async with grpc.aio.insecure_channel(address) as channel:
            mine = [attempt for attempt in tried if address in serving[contract_of(attempt.verb.path)]]
            found = await asyncio.gather(*(each.verb.call(channel, each.claim, each.request) for each in mine))
        wrong = [
            (address, each.verb.path, each.what, status)
            for each, status in zip(mine, found, strict=True)
            if status is not each.refused_as
        ]
        assert not wrong, wrong
    assert await _members(front, security) == before


async def _members(front: str, security: SecuritySection) -> dict[str, str]:
    """Addresses by member id."""
    async with open_channel(front, security) as channel:
        stub = membership_pb2_grpc.MembershipStub(channel)
        answer = await stub.List(membership_pb2.ListRequest(), timeout=_DEADLINE_S)
    return {member.member_id: member.address for member in answer.members}


async def _serving(addresses: Iterable[str], security: SecuritySection) -> dict[str, set[str]]:
    """The services of each contract, as the services themselves say."""
    found = defaultdict[str, set[str]](set)
    for address in addresses:
        async with open_channel(address, security) as channel:
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = await reflection.ServerReflectionInfo(iter([asked]), timeout=_DEADLINE_S).read()
        for service in answer.list_services_response.service:
            if service.name.startswith("rollmesh."):
                found[service.name].add(address)
    return found
