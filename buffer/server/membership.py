"""The Membership service: the processes in the mesh. Served by every front; the state is in Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rollmesh.buffer.monitoring.bounded_answers import within_deadline
from rollmesh.buffer.policy.rules import TABLES
from rollmesh.buffer.protocol.limits import MAX_RUN_MEMBERS
from rollmesh.buffer.server.request_validation import check_policy, check_status, checked_number
from rollmesh.buffer.server.server_state import FrontContext
from rollmesh.buffer.store.store import Store
from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.proof import check_challenge, proven
from rollmesh.mesh.errors import ConfigError, PayloadError, StoreError
from rollmesh.mesh.membership import PROTOCOL
from rollmesh.mesh.request_fields import check_id, check_text
from rollmesh.mesh.trajectory.versions import checked_version
from rollmesh.protos import membership_pb2 as pb
from rollmesh.protos import membership_pb2_grpc
from rollmesh.protos import trajectory_pb2 as trajectory

# Heartbeats expected per lease term, and the part of one without any after which a member's word is called old.
BEATS_PER_TERM = 5
_SILENT_TERMS = 0.5


def _merged(description: bytes, status: bytes | None) -> pb.Member:
    member = pb.Member.FromString(description)
    if status:
        beat = pb.HeartbeatRequest.FromString(status)
        member.serving.CopyFrom(beat.serving)
        for name, value in beat.gauges.items():
            member.gauges[name] = value
        member.waiting_reason = beat.waiting_reason
        member.endpoint = beat.endpoint
    return member


def silent(age_ms: int, reason: str) -> str:
    """The waiting reason of a member whose heartbeats have stopped."""
    return f"silent for {age_ms / 1000:.0f} s" + (f" (was: {reason})" if reason else "")


async def read_members(front: FrontContext) -> tuple[list[pb.Member], bool]:
    """All members with their last gauges and words, marked where they are old, and whether the run has finished."""
    keys = front.store.keys
    flat, beats_flat, status_flat, (seconds, micros), finished = await front.store.redis.batch(
        [
            ("HGETALL", keys.members),
            ("ZRANGE", keys.heartbeats, 0, -1, "WITHSCORES"),
            ("HGETALL", f"{keys.run}:status"),
            ("TIME",),
            ("HGET", keys.run, "finished"),
        ]
    )
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    status = dict(zip(status_flat[::2], status_flat[1::2], strict=True))
    ages = {name: max(0, now_ms - int(at)) for name, at in zip(beats_flat[::2], beats_flat[1::2], strict=True)}
    members = []
    for name, description in zip(flat[::2], flat[1::2], strict=True):
        member = _merged(description, status.get(name))
        member.heartbeat_age_ms = ages.get(name, 0)
        if member.heartbeat_age_ms > _SILENT_TERMS * front.member_ttl_ms:
            member.waiting_reason = silent(member.heartbeat_age_ms, member.waiting_reason)
        members.append(member)
    return sorted(members, key=lambda m: m.joined_unix_ms), int(finished or 0) == 1


def fronts_of(members: Iterable[pb.Member]) -> list[str]:
    """Addresses of the fronts among the members, each of them once."""
    return sorted({member.address for member in members if member.role == pb.ROLE_BUFFER})


async def read_fronts(store: Store) -> list[str]:
    """Addresses of the fronts that are listed; costs nothing for all the other members."""
    (names,) = await store.redis.batch([("SMEMBERS", store.keys.fronts)])
    if not names:
        return []
    (found,) = await store.redis.batch([("HMGET", store.keys.members, *names)])
    return fronts_of(pb.Member.FromString(description) for description in found if description)


class MembershipServicer(membership_pb2_grpc.MembershipServicer):
    """The gRPC side.

    Args:
        front: what the front shares.
        credentials: of the front; None where the mesh has no token.
    """

    def __init__(self, front: FrontContext, credentials: Credentials | None) -> None:
        self._front = front
        self._redis = front.store.redis
        self._credentials = credentials

    async def Join(self, request: pb.JoinRequest, _context: Any) -> pb.JoinResponse:
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
        if request.role not in (pb.ROLE_LEARNER, pb.ROLE_GENERATOR, pb.ROLE_REWARD):
            raise PayloadError("role", f"expected learner, generator or reward, got {request.role}")
        member = pb.Member(
            member_id=request.member_id,
            role=request.role,
            address=request.address,
            host_id=request.host_id,
            pid=request.pid,
            joined_unix_ms=int(time.time() * 1000),
        )
        answer = await self._redis.run_script(
            "join", "", member.member_id, MAX_RUN_MEMBERS, member.SerializeToString(), call
        )
        if answer[0] == b"full":
            raise StoreError(
                f"the run has {MAX_RUN_MEMBERS} members, and takes no more",
                hint="members that fell silent are forgotten within a lease term; does something join again and again?",
            )
        response = pb.JoinResponse(
            generation=answer[1],
            run_config_json=self._front.config_json,
            heartbeat_interval_ms=max(50, self._front.member_ttl_ms // BEATS_PER_TERM),
            member_ttl_ms=self._front.member_ttl_ms,
            run_name=self._front.run_name,
            fronts=await read_fronts(self._front.store),
        )
        return proven(self._credentials, request, response)

    async def Heartbeat(self, request: pb.HeartbeatRequest, _context: Any) -> pb.HeartbeatResponse:
        """See membership.proto."""
        check_policy("serving", request.serving)
        check_status(request)
        check_challenge(request.challenge)
        checked_version("incarnation", request.incarnation)
        answer = await self._redis.run_script(
            "heartbeat", "", request.member_id, request.generation, request.SerializeToString(),
            request.incarnation, self._front.member_ttl_ms,
        )  # fmt: skip
        known, fenced, learner, status, incarnation, version, finished = answer[1:8]
        response = pb.HeartbeatResponse(
            known=bool(known), fenced=bool(fenced), run_finished=bool(finished), fronts=self._front.fronts
        )
        if learner:
            response.learner.CopyFrom(_merged(learner, status))
        if incarnation:
            response.policy.CopyFrom(trajectory.PolicyVersion(incarnation=incarnation, version=version))
        return proven(self._credentials, request, response)

    async def Leave(self, request: pb.LeaveRequest, _context: Any) -> pb.LeaveResponse:
        """See membership.proto."""
        await self._redis.run_script("leave", "", request.member_id, request.generation, int(request.run_finished))
        for table in TABLES:  # its groups wait for other holders
            await self._front.store.refresh(table)
        return pb.LeaveResponse()

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:
        """See membership.proto."""
        members, finished = await within_deadline(read_members(self._front), context)
        chosen = [m for m in members if request.role in (pb.ROLE_UNSPECIFIED, m.role)]
        return pb.ListResponse(members=chosen, run_finished=finished)
