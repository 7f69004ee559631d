"""A member's agent outlasts fronts that come and go."""

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
    """Answers a heartbeat only when it is asked again."""

    def __init__(self) -> None:
        self.heartbeats = 0

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        return pb.JoinResponse(generation=1, run_name="run", heartbeat_interval_ms=60_000)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        self.heartbeats += 1
        if self.heartbeats == 1:
            raise StoreError("Redis is unreachable")
        return pb.HeartbeatResponse(known=True)

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        return pb.LeaveResponse()


async def test_a_mesh_that_goes_away_between_join_and_first_heartbeat_is_asked_again() -> None:
    server, front = rpc.new_server(OPEN), Front()
    membership_pb2_grpc.add_MembershipServicer_to_server(front, server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1', 0, OPEN)}"
    await server.start()
    channel: grpc.aio.Channel = rpc.open_channel(address, OPEN)
    agent = MembershipAgent(
        channel, pb.ROLE_GENERATOR, member_id="g", address="", host_id="h", timeout_s=5.0, retry_s=20.0
    )
    try:
        await agent.start()
        assert front.heartbeats == 2
        await agent.leave()
    finally:
        await channel.close()
        await server.stop(0)
