"""A member's agent outlasts fronts that come and go."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from mesh import rpc
from mesh.config.models import SecuritySection
from mesh.errors import StoreError
from mesh.membership import MembershipAgent
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc

OPEN = SecuritySection()


class Front(membership_pb2_grpc.MembershipServicer):
    """Answers heartbeats as it is told, one after the other."""

    def __init__(self, *answers: pb.HeartbeatResponse | Exception) -> None:
        self.answers = list(answers)
        self.heartbeats = 0

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        return pb.JoinResponse(generation=1, run_name="run", heartbeat_interval_ms=60_000)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        answer = self.answers[self.heartbeats]
        self.heartbeats += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        return pb.LeaveResponse()


@asynccontextmanager
async def joined(front: Front) -> AsyncIterator[MembershipAgent]:
    """An agent that has joined and had its first heartbeat."""
    server = rpc.new_server(OPEN)
    membership_pb2_grpc.add_MembershipServicer_to_server(front, server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1', 0, OPEN)}"
    await server.start()
    channel: grpc.aio.Channel = rpc.open_channel(address, OPEN)
    agent = MembershipAgent(
        channel, pb.ROLE_GENERATOR, member_id="g", address="", host_id="h", timeout_s=5.0, retry_s=20.0
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
        await agent.beat()
        assert not agent.run_finished.is_set()
        await agent.beat()
        assert not agent.run_finished.is_set()
        await agent.beat()
        assert agent.run_finished.is_set()
