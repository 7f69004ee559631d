"""The services that a generator calls: the learner for weights, fronts, and reward services, in the mesh or outside."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.diagnosis import Peer, Peers, peers_of
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.protos import membership_pb2
from rollmesh.reward_service.client.channels import configured

_CALLED = (membership_pb2.ROLE_LEARNER, membership_pb2.ROLE_REWARD, membership_pb2.ROLE_BUFFER)


def called_peers(agent: MembershipAgent, config: Config, identity: Identity) -> Peers:
    """Lists them.

    Args:
        agent: of the generator.
        config: of the run, with this host's security.
        identity: of the generator.
    """
    in_mesh = peers_of(agent, config.security, identity, *_CALLED)
    servers = configured(config.reward, config.security).items()
    outside = [Peer(membership_pb2.ROLE_REWARD, address, connect) for address, connect in servers]

    async def listed() -> Sequence[Peer]:
        return [*outside, *await in_mesh()]

    return listed
