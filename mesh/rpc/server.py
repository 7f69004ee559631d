"""gRPC servers of the mesh: permitted callers, bounds of connections, and addresses that a server may bind.

Invariant: a bind that other machines can reach needs a token, unless insecurity was asked for by name.
"""

from __future__ import annotations

import logging
from types import MappingProxyType

import grpc

from rollmesh.mesh.access.credentials import SharedKey
from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.access.tls import server_credentials
from rollmesh.mesh.access.token_file import credentials_of
from rollmesh.mesh.addresses import join_address
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, PortInUseError
from rollmesh.mesh.rpc.connection_options import KEEPALIVE_S, connection_options
from rollmesh.mesh.rpc.held_ports import is_held
from rollmesh.mesh.rpc.request_guard import Decoders, RequestGuard
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.mesh.runtime.open_files import connections_here

log = logging.getLogger(__name__)

# Seconds after which a service closes a connection that has not begun to speak HTTP/2, and TLS where that is asked for.
HANDSHAKE_S = 10.0
# Calls that a connection may have at once; others wait at their caller. A member has some tens of streams and calls.
MOST_CALLS = 1024
# Bytes of a call's headers, as HTTP/2 counts them; with a claim they are about one KiB.
MOST_HEADERS = 8 << 10


def new_server(
    security: SecuritySection,
    identity: Identity | None = None,
    *,
    key: SharedKey | None = None,
    max_message_mb: int = 64,
    keepalive_s: float = KEEPALIVE_S,
    decoders: Decoders = MappingProxyType({}),
) -> grpc.aio.Server:
    """A server with handlers that may raise `RollmeshError`; with a token, it serves only permitted callers.

    Streaming handlers must be async generators (`yield`), unary ones coroutines.

    Args:
        security: token and TLS.
        identity: of the service.
        key: of a service outside the mesh; goes before the token.
        max_message_mb: largest message in and out.
        keepalive_s: seconds of silence after which a connection is asked for a sign of life.
        decoders: by method, a parser of its requests in place of the generated code. Its result has the request as
            `message`; it raises `DecodeError`.
    """
    options = [
        *connection_options(max_message_mb, keepalive_s),
        # Binds in addition to the socket that holds its port, where there is one.
        ("grpc.so_reuseport", int(is_held())),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_concurrent_streams", MOST_CALLS),
        # Between the two limits a server refuses headers by chance, so both are equal.
        ("grpc.max_metadata_size", MOST_HEADERS),
        ("grpc.absolute_max_metadata_size", MOST_HEADERS),
        ("grpc.max_allowed_incoming_connections", connections_here().calls),
    ]
    return grpc.aio.server(
        interceptors=[RequestGuard(key or credentials_of(security, identity), decoders)], options=options
    )


def check_exposure(host: str, security: SecuritySection) -> None:
    """Refuses to bind an address that other hosts could reach without a token; TLS alone identifies no caller.

    Raises:
        ConfigError: a non-loopback address without a token.
    """
    if is_loopback(host):
        return
    if security.token_file is None and not security.allow_insecure:
        raise ConfigError(
            f"refusing to bind {host}: others could reach it without a token",
            hint="set security.token_file (--token-file, see rollmesh token), or security.allow_insecure: true",
        )
    if security.tls_cert is None:
        log.warning(
            "%s is served without TLS: others on the network can read the traffic, and call in the name of its senders",
            host,
        )


def bind(server: grpc.aio.Server, host: str, port: int, security: SecuritySection) -> int:
    """Binds `host:port` (0 picks a free port) and returns the port.

    Raises:
        ConfigError: a non-loopback address without a token, or files of TLS that cannot be used.
        PortInUseError: the port is taken.
    """
    check_exposure(host, security)
    tls = server_credentials(security)
    target = join_address(host, port)
    try:
        bound = server.add_secure_port(target, tls) if tls is not None else server.add_insecure_port(target)
    except RuntimeError as error:
        raise PortInUseError(
            f"cannot bind {target}: {error}", hint="choose another port, 0 for any free one"
        ) from error
    if bound == 0:
        raise PortInUseError(f"cannot bind {target}", hint="choose another port, 0 for any free one")
    return int(bound)
