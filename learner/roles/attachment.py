"""Rank 0's connections to the roles elsewhere: they are members of the mesh, and found there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc

from rollmesh.learner.roles.agreement import agreed_settings
from rollmesh.learner.roles.client import RoleClient, RoleLimits
from rollmesh.learner.roles.remote_role import RemoteRole
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config import Config
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.wait import Wait
from rollmesh.protos import membership_pb2

# Words about the progress of a call come every second.
_SILENT_RPCS = 2.0


def connect_roles(
    config: Config, roles: Iterable[RemoteRole], agent: MembershipAgent, bridge: AsyncBridge, status: LearnerStatus
) -> None:
    """Gives the roles of the leading process their clients; nothing is called yet.

    Args:
        config: of the run.
        roles: elsewhere.
        agent: this learner's membership.
        bridge: the event loop.
        status: of the learner; waits for roles are reported there, and to the mesh.
    """
    network, distributed = config.network, config.learner.distributed
    identity = Identity(Role.LEARNER, agent.member_id)
    limits = RoleLimits(
        silence_s=_SILENT_RPCS * network.rpc_timeout_s,
        away_s=distributed.timeout_s,
        call_s=distributed.order_timeout_s,
    )

    async def find() -> Sequence[str]:
        # Those that joined last come first: a member that has died is listed until its time is over.
        members = await agent.members(membership_pb2.ROLE_MODEL)
        return [member.address for member in sorted(members, key=lambda m: m.joined_unix_ms, reverse=True)]

    def dial(address: str) -> grpc.aio.Channel:
        return open_channel(address, config.security, identity, max_message_mb=network.max_message_mb)

    def report(reason: str) -> None:
        status.waiting_reason = reason
        agent.set_status(wait=Wait(reason))

    for role in roles:
        role.connect(bridge, RoleClient(role.role, agreed_settings(config, role.role), find, dial, limits, report))
