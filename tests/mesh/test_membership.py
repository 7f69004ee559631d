"""A member's agent outlasts fronts that come and go."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.proof import with_proof
from rollmesh.mesh.access.role_grants import MeshKey
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret import parse_secret
from rollmesh.mesh.access.token_file import credentials_of
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import StoreError, UnauthenticatedError
from rollmesh.mesh.membership import MembershipAgent, Presence
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import membership_pb2 as pb
from rollmesh.protos import membership_pb2_grpc
from tests.secrets_here import TOKEN, write_secret

OPEN = SecuritySection()


class Front(membership_pb2_grpc.MembershipServicer):
    """Answers heartbeats as it is told, one after the other, and takes every claim."""

    def __init__(
        self,
        *answers: pb.HeartbeatResponse | Exception,
        interval_ms: int = 60_000,
        credentials: Credentials | None = None,
    ) -> None:
        self.answers = list(answers)
        self.interval_ms = interval_ms
        self.credentials = credentials
        self.heard: list[pb.HeartbeatRequest] = []

    @property
    def heartbeats(self) -> int:
        return len(self.heard)

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        response = pb.JoinResponse(generation=1, run_name="run", heartbeat_interval_ms=self.interval_ms)
        return with_proof(self.credentials, request, response)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        answer = self.answers[min(self.heartbeats, len(self.answers) - 1)]
        self.heard.append(request)
        if isinstance(answer, Exception):
            raise answer
        return with_proof(self.credentials, request, copy.deepcopy(answer))

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        return pb.LeaveResponse()


@asynccontextmanager
async def joined(
    front: Front, retry_s: float = 20.0, credentials: Credentials | None = None
) -> AsyncIterator[MembershipAgent]:
    """An agent that has joined and had its first heartbeat."""
    server = new_server(OPEN)
    membership_pb2_grpc.add_MembershipServicer_to_server(front, server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, OPEN)}"
    await server.start()
    channel: grpc.aio.Channel = open_channel(address, OPEN, credentials)
    agent = MembershipAgent(
        channel, pb.ROLE_GENERATOR, member_id="generator-g", address="", host_id="h", timeout_s=5.0, retry_s=retry_s
    )
    try:
        await agent.start()
        yield agent
        await agent.leave()
    finally:
        await channel.close()
        await server.stop(0)


async def test_a_mesh_that_goes_away_between_join_and_first_heartbeat_is_asked_again() -> None:
    front = Front(StoreError("Redis is unreachable"), pb.HeartbeatResponse(known=True))
    async with joined(front):
        assert front.heartbeats == 2


async def test_who_joins_a_run_that_has_ended_waits_for_it_to_go_on() -> None:
    ended, going_on = (pb.HeartbeatResponse(known=True, run_finished=over) for over in (True, False))
    async with joined(Front(ended, ended, going_on, ended)) as agent:
        await agent.heartbeat()
        assert not agent.run_finished.is_set()
        await agent.heartbeat()
        assert not agent.run_finished.is_set()
        await agent.heartbeat()
        assert agent.run_finished.is_set()


def test_a_gap_in_which_others_do_not_see_a_member_begins_another_term() -> None:
    presence, now = Presence(), time.monotonic()
    assert not presence.holds(presence.term)
    presence.renew(now, 1000.0)
    term = presence.term
    presence.renew(now, 2000.0)
    assert presence.holds(term)
    # Sent too long ago: the time to live was over before the answer came.
    presence.renew(now - 10.0, 5.0)
    assert not presence.holds(term)
    presence.renew(now, 1000.0)
    assert not presence.holds(term)
    assert presence.holds(presence.term)
    presence.end()
    assert not presence.holds(presence.term)


async def test_a_member_that_was_stopped_itself_asks_the_mesh_again() -> None:
    known = pb.HeartbeatResponse(known=True)
    front = Front(known, known, StoreError("Redis is unreachable"), known, interval_ms=20)
    async with joined(front, retry_s=0.3) as agent, asyncio.timeout(180):
        while front.heartbeats < 2:
            await asyncio.sleep(0.005)
        time.sleep(0.4)  # nothing runs here meanwhile, as after SIGSTOP
        while front.heartbeats < 6:
            assert not agent.lost.is_set(), agent.lost_error
            await asyncio.sleep(0.005)


async def test_the_end_of_a_wait_is_reported_at_once() -> None:
    front = Front(pb.HeartbeatResponse(known=True))
    async with joined(front) as agent:
        agent.set_status(wait=Wait("no reward service answers", pb.WAIT_CAUSE_NO_REWARD_SERVICE))
        await agent.heartbeat()
        agent.set_status(wait=NO_WAIT)
        async with asyncio.timeout(180):
            while front.heartbeats < 3:  # the next would be due in a minute
                await asyncio.sleep(0.005)
        agent.set_status(wait=NO_WAIT)
        assert [(heard.waiting_reason, heard.wait_cause) for heard in front.heard] == [
            ("", pb.WAIT_CAUSE_UNSPECIFIED),
            ("no reward service answers", pb.WAIT_CAUSE_NO_REWARD_SERVICE),
            ("", pb.WAIT_CAUSE_UNSPECIFIED),
        ]


async def test_a_member_whose_heartbeats_fail_by_a_fault_is_lost() -> None:
    known = pb.HeartbeatResponse(known=True)

    def fault() -> None:
        raise ValueError("a fault of ours")

    async with joined(Front(known, interval_ms=20)) as agent, asyncio.timeout(180):
        agent.learner = pb.Member(member_id="another")  # so that the next heartbeat has news
        agent.on_change(fault)
        await agent.lost.wait()
    assert "a fault of ours" in str(agent.lost_error)


def of_the_mesh(role: Role, member_id: str = "") -> Credentials:
    return parse_secret(TOKEN, "").credentials(Identity(role, member_id))


async def test_who_only_answers_at_the_address_of_the_mesh_is_refused() -> None:
    impostor = Front(pb.HeartbeatResponse(known=True, run_finished=True))
    with pytest.raises(UnauthenticatedError, match="cannot prove"):
        async with joined(impostor, credentials=of_the_mesh(Role.GENERATOR, "generator-g")):
            pass
    assert impostor.heartbeats == 0


async def test_who_takes_the_place_of_a_front_is_not_believed_either() -> None:
    known = pb.HeartbeatResponse(known=True)
    evil = pb.HeartbeatResponse(known=True, run_finished=True, learner=pb.Member(member_id="evil", address="e:1"))
    front = Front(known, known, evil, interval_ms=20, credentials=of_the_mesh(Role.BUFFER))
    async with (
        joined(front, retry_s=0.3, credentials=of_the_mesh(Role.GENERATOR, "generator-g")) as agent,
        asyncio.timeout(180),
    ):
        while front.heartbeats < 2:
            await asyncio.sleep(0.005)
        front.credentials = None
        await agent.lost.wait()
        assert not agent.run_finished.is_set()
        assert agent.learner is None
    assert isinstance(agent.lost_error, UnauthenticatedError)


async def test_a_member_whose_grant_ends_is_lost_and_says_which_file_to_replace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = now = time.time()
    path = write_secret(tmp_path / "token", MeshKey(TOKEN).grant_file(Role.GENERATOR, until=started + 600))
    mine = credentials_of(SecuritySection(token_file=path), Identity(Role.GENERATOR, "generator-g"), lambda: now)
    front = Front(pb.HeartbeatResponse(known=True), interval_ms=20, credentials=of_the_mesh(Role.BUFFER))
    async with joined(front, retry_s=0.3, credentials=mine) as agent, asyncio.timeout(180):
        now = started + 601
        await agent.lost.wait()
    # Nor can it leave in order, which its lease does for it.
    assert isinstance(agent.lost_error, UnauthenticatedError)
    assert str(path) in str(agent.lost_error)
    warned = [line for line in caplog.messages if line.startswith("heartbeats")]
    assert len(warned) == 1, "once in the first second"
