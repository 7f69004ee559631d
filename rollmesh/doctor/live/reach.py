"""The clocks of all services, and who reaches whom: each service is asked, and calls its own peers.

A clock is read in the middle of the fastest of a few calls, so that half a round trip is its error.

Invariants: fronts alone speak for Redis and for the configuration. A service's words are bounded, and none is a command
for a terminal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from rollmesh.doctor.before.redis_server import judge_clock
from rollmesh.doctor.findings import Finding, not_checked, ok, problem, warning
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.diagnosis import MOST_PEERS
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.request_fields import ID_CHARACTERS
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.text import REPORT_CHARACTERS, bounded
from rollmesh.protos import diagnosis_pb2, diagnosis_pb2_grpc, membership_pb2

CHECK = "reachability"
# Services that are asked, of many: the first ones of each role.
_MOST_OF_A_ROLE = 32
_AT_ONCE = 16
_CLOCK_S = 5.0
_CLOCK_CALLS = 3
_PEERS_S = 30.0


@dataclass(frozen=True, slots=True)
class Examined:
    """The answers of one service.

    Attributes:
        member: asked.
        ahead_s: seconds by which its clock is ahead of this machine's.
        redis_ahead_s: the same of Redis' clock; None: it is no front.
        peers: that it called.
        config_json: the run's configuration; empty from services other than fronts.
        error: why it did not answer, or not to all; empty where it did.
    """

    member: membership_pb2.Member
    ahead_s: float | None = None
    redis_ahead_s: float | None = None
    peers: Sequence[diagnosis_pb2.PeerReach] = ()
    config_json: str = ""
    error: str = ""


async def examine_all(members: Sequence[membership_pb2.Member], security: SecuritySection) -> list[Examined]:
    """Asks the services that have an address; those of a role that are many are asked in part.

    Args:
        members: of the mesh.
        security: of this caller.
    """
    chosen: list[membership_pb2.Member] = []
    for role in dict.fromkeys(member.role for member in members):
        chosen += [member for member in members if member.role == role and member.address][:_MOST_OF_A_ROLE]
    room = asyncio.Semaphore(_AT_ONCE)

    async def in_turn(member: membership_pb2.Member) -> Examined:
        async with room:
            return await _examine(member, security)

    return await asyncio.gather(*map(in_turn, chosen))


async def _examine(member: membership_pb2.Member, security: SecuritySection) -> Examined:
    ahead = redis_ahead = None
    is_front = member.role == membership_pb2.ROLE_BUFFER
    try:
        channel = open_channel(member.address, security)
    except RollmeshError as error:
        return Examined(member, error=str(error))
    try:
        stub = diagnosis_pb2_grpc.DiagnosisStub(channel)
        best = float("inf")
        for _ in range(_CLOCK_CALLS):
            began, wall = time.monotonic(), time.time()
            answer = await stub.Examine(diagnosis_pb2.ExamineRequest(), timeout=_CLOCK_S)
            took = time.monotonic() - began
            if took < best:
                best, middle = took, wall + took / 2
                ahead = answer.unix_ms / 1000 - middle
                redis_ahead = answer.redis_unix_ms / 1000 - middle if is_front and answer.redis_unix_ms else None
        called = await stub.Examine(diagnosis_pb2.ExamineRequest(peers=True), timeout=_PEERS_S)
    except grpc.aio.AioRpcError as error:
        return Examined(member, ahead, redis_ahead, error=str(to_rollmesh_error(error, member.address)))
    finally:
        await channel.close()
    peers = [_bounded(peer) for peer in called.peers[:MOST_PEERS]]
    return Examined(member, ahead, redis_ahead, peers, called.run_config_json if is_front else "")


def _bounded(peer: diagnosis_pb2.PeerReach) -> diagnosis_pb2.PeerReach:
    address, error = bounded(peer.address, ID_CHARACTERS), bounded(peer.error, REPORT_CHARACTERS)
    return diagnosis_pb2.PeerReach(role=peer.role, address=address, milliseconds=peer.milliseconds, error=error)


def judge_clocks(examined: Sequence[Examined]) -> Iterator[Finding]:
    """Compares all clocks with that of Redis, by which leases end.

    Args:
        examined: the answers.
    """
    redis = next((one.redis_ahead_s for one in examined if one.redis_ahead_s is not None), None)
    than = "this machine" if redis is None else "Redis"
    findings = [
        finding
        for one in examined
        if one.ahead_s is not None
        for finding in judge_clock(one.ahead_s - (redis or 0.0), _name(one.member), than)
    ]
    if redis is not None:
        findings += judge_clock(-redis, "this machine", "Redis")
    yield from findings


def judge_reach(examined: Sequence[Examined]) -> Iterator[Finding]:
    """Says which service does not reach which.

    Args:
        examined: the answers.
    """
    reached = 0
    for one in examined:
        if one.error:
            yield not_checked(CHECK, f"{_name(one.member)} at {one.member.address}: {one.error}")
        for peer in one.peers:
            if not peer.error:
                reached += 1
                continue
            to_generator = peer.role == membership_pb2.ROLE_GENERATOR
            severity = warning if to_generator else problem
            yield severity(
                CHECK,
                f"{_name(one.member)} does not reach {_role(peer.role)} at {peer.address}: {peer.error}",
                f"open that port from the host of {_name(one.member)} (firewall, security group), or start the "
                f"{_role(peer.role)} with network.advertise set to an address that is reached from there"
                + ("; the learner calls generators only for turns on shared devices" if to_generator else ""),
                caller=one.member.member_id,
                peer=peer.address,
            )
    if reached:
        yield ok(CHECK, f"{reached} ways between services are open", ways=reached)


def _name(member: membership_pb2.Member) -> str:
    return member.member_id or member.address


def _role(role: membership_pb2.Role) -> str:
    names = {membership_pb2.ROLE_BUFFER: "front", membership_pb2.ROLE_REWARD: "reward service"}
    return names.get(role, membership_pb2.Role.Name(role).removeprefix("ROLE_").lower())
