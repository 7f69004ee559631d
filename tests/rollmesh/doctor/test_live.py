"""Every fault that is planted in a mesh is found, and its remedy named."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable

import grpc
import pytest

from rollmesh.doctor.findings import Finding, Severity
from rollmesh.doctor.live.diagnosis import watched
from rollmesh.doctor.live.members import judge_members
from rollmesh.doctor.live.reach import examine_all, judge_clocks, judge_reach
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.diagnosis import DiagnosisServicer, Peer
from rollmesh.protos import buffer_pb2, membership_pb2, trajectory_pb2
from tests.mesh.test_diagnosis import peer, serving, these
from tests.rollmesh.doctor.documented import documented, is_found

_VERSION = 9


def member(role: str, *, version: int = _VERSION, **fields: object) -> membership_pb2.Member:
    serves = trajectory_pb2.PolicyVersion(incarnation=1, version=version)
    number = membership_pb2.Role.Value(f"ROLE_{role.upper()}")
    return membership_pb2.Member(member_id=f"{role}-1", role=number, serving=serves, **fields)


def mesh(*members: membership_pb2.Member, **table: int) -> Snapshot:
    in_force = trajectory_pb2.PolicyVersion(incarnation=1, version=_VERSION)
    return Snapshot(table=buffer_pb2.DescribeResponse(policy=in_force, **table), members=list(members))


_LEARNER = member("learner")
_MESHES: dict[str, Snapshot] = {
    "no-generator": mesh(_LEARNER),
    "member-silent": mesh(_LEARNER, member("generator", waiting_reason="silent for 12 s", heartbeat_age_ms=12_000)),
    "generator-outdated": mesh(_LEARNER, member("generator", version=2)),
    "grant-ends": mesh(_LEARNER, member("generator", gauges={"grant_seconds_left": 3600.0})),
    "redis-full": mesh(_LEARNER, member("generator"), redis_used_bytes=99 << 20, redis_max_bytes=100 << 20),
}


@pytest.mark.parametrize("fault", _MESHES)
def test_a_fault_that_members_report_is_found(fault: str) -> None:
    findings = list(judge_members(_MESHES[fault], _MESHES[fault]))
    assert is_found(documented()[fault], findings), findings
    assert len(_worse(findings)) == 1, "one fault, and nothing else"


def test_a_generator_that_moves_is_not_left_behind() -> None:
    """Versions of a quick run change between two heartbeats."""
    before, now = mesh(member("generator", version=2), _LEARNER), mesh(member("generator", version=5), _LEARNER)
    assert not [found for found in judge_members(now, before) if found.severity is Severity.WARNING]


def _worse(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity in (Severity.WARNING, Severity.PROBLEM)]


async def test_clocks_and_ways_are_those_of_the_services() -> None:
    """A front whose Redis is two minutes slow, compared with its host, and a generator that reaches one peer of two."""

    async def redis() -> int:
        return int(1000 * (time.time() - 120))

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        async with (
            serving(DiagnosisServicer(redis_clock=redis)) as front,
            serving(DiagnosisServicer(these(peer(front), peer(closed)))) as generator,
        ):
            members = [member("buffer", address=front), member("generator", address=generator)]
            examined = await examine_all(members, SecuritySection())
    clocks, ways = list(judge_clocks(examined)), list(judge_reach(examined))
    assert is_found(documented()["clock-off"], clocks)
    assert all("120." in found.what or "119." in found.what for found in _worse(clocks)), clocks
    assert is_found(documented()["peer-not-reached"], ways)
    (missed,) = _worse(ways)
    assert closed in missed.what
    assert any(found.severity is Severity.OK for found in ways), "the other way is open"


async def test_a_service_that_cannot_be_asked_is_said_to_be_unknown() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        (examined,) = await examine_all([member("generator", address=address)], SecuritySection())
    assert list(judge_clocks([examined])) == []
    (finding,) = judge_reach([examined])
    assert finding.severity is Severity.NOTE
    assert "not checked" in finding.what


def test_shares_of_time_are_those_between_two_looks() -> None:
    def look(idle_s: float, waited_ms: int) -> Snapshot:
        gauges = {"gate_wait_seconds": idle_s}
        return mesh(_LEARNER, member("generator", gauges=gauges), waiting_for_inserts_ms=waited_ms)

    use = watched((100.0, look(50.0, 1000)), (110.0, look(55.0, 4000)))
    assert use.learner == {"wait": pytest.approx(0.3)}
    assert use.idle == pytest.approx(0.5)
    assert use.reward_busy is None, "there is no reward service"


def test_all_documented_faults_are_planted() -> None:
    from tests.rollmesh.doctor import faults_after, faults_before

    planted: dict[str, Callable[..., object] | object] = {**faults_before.FAULTS, **faults_after.FAULTS, **_MESHES}
    assert documented().keys() == {*planted, "clock-off", "peer-not-reached"}


async def test_a_service_speaks_for_itself_alone() -> None:
    """A generator says what only fronts know, and gives an address that a terminal would obey."""

    async def redis() -> int:
        return 1

    hostile = Peer(membership_pb2.ROLE_BUFFER, "\x1b[2J:1", lambda: grpc.aio.insecure_channel("127.0.0.1:1"))
    servicer = DiagnosisServicer(these(*[hostile] * 2), redis_clock=redis, config_json="no JSON")
    async with serving(servicer) as generator:
        (answer,) = await examine_all([member("generator", address=generator)], SecuritySection())
    assert answer.ahead_s is not None
    assert answer.redis_ahead_s is None
    assert not answer.config_json
    assert answer.peers
    assert not any("\x1b" in finding.what for finding in judge_reach([answer]))
