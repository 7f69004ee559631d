"""gRPC channels to reward servers: those of other people, and members of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import grpc

from rollmesh.mesh.access.authenticated_channel import AuthenticatedChannel
from rollmesh.mesh.access.credentials import SharedKey
from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.access.tls import client_credentials
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.reward import EndpointTls, RewardSection
from rollmesh.mesh.private_files import read_secret
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.reward_service.routing import is_grpc, split_routes, target_of

OpenChannel = Callable[[str], grpc.aio.Channel]


def foreign_channels(
    security: SecuritySection,
    keys: Mapping[str, Path] = MappingProxyType({}),
    tls: Mapping[str, EndpointTls] = MappingProxyType({}),
    *,
    max_message_mb: int = 64,
) -> OpenChannel:
    """Opens channels to configured endpoints, which may be other people's servers.

    `grpc://` is plain text; `grpcs://` is TLS, checked by the endpoint's own authority, or by `security.tls_ca`, or
    else by the usual public authorities.
    Neither carries the mesh's credentials: reward services of the mesh itself are found through its membership. Neither
    carries the mesh's keepalive pings: a server with gRPC's defaults hangs up on clients that ping so often. The
    deadline of every call finds a dead connection anyway.

    Args:
        keys: by endpoint, the file with the key that is sent there.
        tls: by endpoint, the files for its TLS.
    """
    own_tls = {target_of(address): section for address, section in tls.items() if is_grpc(address)}
    files = {target_of(address): path for address, path in keys.items() if is_grpc(address)}
    options = [
        ("grpc.max_send_message_length", max_message_mb << 20),
        ("grpc.max_receive_message_length", max_message_mb << 20),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]

    def connect(address: str) -> grpc.aio.Channel:
        target = target_of(address)
        path = files.get(target)
        if not address.startswith("grpcs://"):
            channel = grpc.aio.insecure_channel(target, options=options)
        else:
            own = own_tls.get(target, EndpointTls())
            ca = own.ca or security.tls_ca
            credentials = client_credentials(ca, own.cert, own.key, f"reward.tls.{address}.")
            channel = grpc.aio.secure_channel(target, credentials, options=options)
        if path is None:
            return channel
        return AuthenticatedChannel(channel, SharedKey(read_secret(path, f"reward.key_files.{address}")))

    return connect


def mesh_channels(
    security: SecuritySection, identity: Identity | None = None, *, max_message_mb: int = 64
) -> OpenChannel:
    """Opens channels to reward services that are members of the mesh, with its credentials and TLS.

    Args:
        identity: the caller's; None: as the token file makes it.
    """
    return lambda address: open_channel(target_of(address), security, identity, max_message_mb=max_message_mb)


def configured(reward: RewardSection, security: SecuritySection) -> dict[str, Callable[[], grpc.aio.Channel]]:
    """Openers of channels, as the client has them, to all gRPC servers that the configuration names; by address.

    Args:
        reward: of the run.
        security: of the caller.
    """
    connect = foreign_channels(security, reward.key_files, reward.tls)
    routed = split_routes(reward.by_data_source)[1].values()
    addresses = dict.fromkeys((*reward.endpoints, *chain.from_iterable(routed)))
    return {address: partial(connect, address) for address in addresses if is_grpc(address)}
