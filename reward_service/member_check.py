"""The conformance kit's calls to a member of a mesh, whose credentials the kit itself does not know."""

from __future__ import annotations

import grpc

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.reward_service.client.channels import mesh_channels
from rollmesh.reward_service.conformance.grpc_transport import GrpcTransport


def member_transport(address: str, security: SecuritySection) -> GrpcTransport:
    """A transport with the mesh's token and TLS.

    Args:
        address: `grpc://host:port`.

    Raises:
        ConfigError: a malformed address, or a token that cannot be read.
    """
    stranger = security.model_copy(update={"token_file": None})

    def open_channel(trusted: bool) -> grpc.aio.Channel:
        return mesh_channels(security if trusted else stranger)(address)

    return GrpcTransport(open_channel, has_key=security.token_file is not None)
