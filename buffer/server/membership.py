"""The Membership service: the processes in the mesh. Served by every front; the state is in Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rollmesh.buffer.monitoring.bounded_answers import within_deadline
from rollmesh.buffer.protocol.limits import MAX_RUN_MEMBERS, RESERVED_MEMBERS
from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.server.request_validation import check_policy, check_status, checked_number
from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.proof import check_challenge, with_proof
from rollmesh.mesh.errors import ConfigError, PayloadError, StoreError
from rollmesh.mesh.membership import PROTOCOL
from rollmesh.mesh.request_fields import check_id, check_text
from rollmesh.mesh.tables import TABLES
from rollmesh.mesh.told_address import told_address
from rollmesh.mesh.trajectory.versions import checked_version
from rollmesh.protos import membership_pb2 as pb
from rollmesh.protos import membership_pb2_grpc

# Heartbeats expected per lease term, and the part of one without any after which a member's word is called old.
HEARTBEATS_PER_TERM = 5
_SILENT_TERMS = 0.5
# One costs about 50 microseconds of the front.
_MEMBERS_READ_PER_S = 1000


def _most_members(role: pb.Role) -> int:
    """Members of the run from which on no other one of a role is taken; 0: any number.

    A generator's credential must not keep others out, least of all a learner that comes back.
    """
    if role == pb.ROLE_LEARNER:
        return 0
    return MAX_RUN_MEMBERS - RESERVED_MEMBERS if role == pb.ROLE_GENERATOR else MAX_RUN_MEMBERS


def silent_reason(age_ms: int, reason: str) -> str:
    """The waiting reason of a member without heartbeats."""
    return f"silent for {age_ms / 1000:.0f} s" + (f" (was: {reason})" if reason else "")


async def read_members(front: FrontContext, role: pb.Role = pb.ROLE_UNSPECIFIED) -> tuple[list[pb.Member], bool]:
    """Members with their last status, marked if it is old; and whether the run has finished.

    Args:
        role: theirs; unspecified: all members.
    """
    registry = front.store.members
    members, finished = await (registry.read_role(role) if role else registry.read_all())
    silent_ms = _SILENT_TERMS * front.membership.member_ttl_ms
    return [_marked_silent(member) if member.heartbeat_age_ms > silent_ms else member for member in members], finished


def _marked_silent(member: pb.Member) -> pb.Member:
    """A copy whose waiting reason says for how long it has been silent."""
    marked = pb.Member()
    marked.CopyFrom(member)
    marked.waiting_reason = silent_reason(member.heartbeat_age_ms, member.waiting_reason)
    return marked


def reading_interval_s(members: int, least_s: float) -> float:
    """Seconds between two readings of all members: with thousands of them rarer, as each reading costs more."""
    return max(least_s, members / _MEMBERS_READ_PER_S)


def fronts_of(members: Iterable[pb.Member]) -> list[str]:
    """Addresses of the fronts among the members, each of them once."""
    return sorted({member.address for member in members if member.role == pb.ROLE_BUFFER})


class MembershipServicer(membership_pb2_grpc.MembershipServicer):
    """The gRPC side.

    Args:
        front: what the front shares.
        credentials: of the front; None where the mesh has no token.
    """

    def __init__(self, front: FrontContext, credentials: Credentials | None) -> None:
        self._front = front
        self._members = front.store.members
        self._credentials = credentials

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        """See membership.proto."""
        if request.protocol != PROTOCOL:
            raise ConfigError(
                f"member {request.member_id} speaks protocol {request.protocol}, this mesh speaks {PROTOCOL}",
                hint="install the same release everywhere",
            )
        check_id("member_id", request.member_id)
        check_text("address", request.address)
        check_text("host_id", request.host_id)
        check_challenge(request.challenge)
        call = checked_number("call", request.call)
        if request.role not in (pb.ROLE_LEARNER, pb.ROLE_GENERATOR, pb.ROLE_REWARD, pb.ROLE_MODEL):
            raise PayloadError("role", f"expected learner, generator, reward or model, got {request.role}")
        member = pb.Member(
            member_id=request.member_id,
            role=request.role,
            address=told_address(request, context.peer()),
            host_id=request.host_id,
            pid=request.pid,
            joined_unix_ms=int(time.time() * 1000),
        )
        limit = _most_members(request.role)
        joined = await self._members.join(member, call=call, limit=limit)
        if joined is None:
            raise StoreError(
                f"the run has {limit} members, and takes no more of {pb.Role.Name(request.role)}",
                hint="silent members are removed within a lease term; does something join again and again?",
            )
        response = pb.JoinResponse(
            generation=joined.generation,
            call=joined.call,
            run_config_json=self._front.membership.config_json,
            heartbeat_interval_ms=max(50, self._front.membership.member_ttl_ms // HEARTBEATS_PER_TERM),
            member_ttl_ms=self._front.membership.member_ttl_ms,
            run_name=self._front.membership.run_name,
            fronts=fronts_of((await self._members.read_role(pb.ROLE_BUFFER))[0]),
        )
        return with_proof(self._credentials, request, response)

    async def Heartbeat(self, request: pb.HeartbeatRequest, _context: Any) -> pb.HeartbeatResponse:
        """See membership.proto."""
        check_policy("serving", request.serving)
        check_status(request)
        check_challenge(request.challenge)
        checked_version("incarnation", request.incarnation)
        mesh = await self._members.heartbeat(request, self._front.membership.member_ttl_ms)
        response = pb.HeartbeatResponse(
            known=mesh.known,
            fenced=mesh.fenced,
            run_finished=mesh.run_finished,
            fronts=self._front.fronts,
            learner=mesh.learner,
            policy=mesh.policy.to_proto() if mesh.policy else None,
        )
        return with_proof(self._credentials, request, response)

    async def Leave(self, request: pb.LeaveRequest, _context: Any) -> pb.LeaveResponse:
        """See membership.proto."""
        await self._members.leave(request.member_id, request.generation, run_finished=request.run_finished)
        for table in TABLES:  # its groups wait for other holders
            await self._front.store.refresh(table)
        return pb.LeaveResponse()

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:
        """See membership.proto."""
        members, finished = await within_deadline(read_members(self._front, request.role), context)
        return pb.ListResponse(members=members, run_finished=finished)
