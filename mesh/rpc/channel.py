"""A channel to one service, with the caller's credentials and TLS."""

from __future__ import annotations

import grpc

from rollmesh.mesh.access.authenticated_channel import AuthenticatedChannel
from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.access.tls import channel_credentials
from rollmesh.mesh.access.token_file import credentials_of
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.rpc.connection_options import KEEPALIVE_S, connection_options


def open_channel(
    address: str,
    security: SecuritySection,
    caller: Identity | Credentials | None = None,
    *,
    max_message_mb: int = 64,
    keepalive_s: float = KEEPALIVE_S,
) -> grpc.aio.Channel:
    """A channel to `host:port` (or `grpc://host:port`) that reconnects by itself within a second or two.

    Args:
        caller: the caller of all calls; none: the identity that the token file gives.
    """
    options = [
        *connection_options(max_message_mb, keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name: the longest time that one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A name whose address has changed is looked up again this soon; gRPC's own interval is half a minute.
        ("grpc.dns_min_time_between_resolutions_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    target = address.removeprefix("grpc://")
    credentials = caller if isinstance(caller, Credentials) else credentials_of(security, caller)
    tls = channel_credentials(security)
    if tls is not None:
        channel = grpc.aio.secure_channel(target, tls, options=options)
    else:
        channel = grpc.aio.insecure_channel(target, options=options)
    return AuthenticatedChannel(channel, credentials) if credentials else channel
