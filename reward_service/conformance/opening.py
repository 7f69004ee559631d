"""Transports by the scheme of an address."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.conformance.grpc_transport import GrpcTransport, channels
from rollmesh.reward_service.conformance.http_transport import HttpTransport
from rollmesh.reward_service.conformance.transport import Transport

SCHEMES = ("grpc", "grpcs", "http", "https")


def open_transport(address: str, *, key: str = "", ca: Path | None = None) -> Transport:
    """A transport to a server outside of a mesh; nothing is sent yet.

    Args:
        address: `grpc://host:port`, `http://host:port/base`, or either with TLS: `grpcs://`, `https://`.
        key: the server's key; empty: it has none.
        ca: authorities that the server's certificate is checked by, PEM; None: the public ones.

    Raises:
        ConfigError: a malformed address, or a file that cannot be read.
    """
    url = urlsplit(address)
    is_http = url.scheme.startswith("http")
    try:
        complete = url.scheme in SCHEMES and url.hostname and (url.port or (is_http and url.port is None))
    except ValueError:
        complete = False
    if not complete or (url.path.strip("/") and not is_http):
        raise ConfigError(
            f"reward endpoint: {address!r} is not host:port with a scheme",
            hint="give grpc://host:port, grpcs://host:port, http://host:port/base or https://host:port/base",
        )
    if key and url.scheme in ("grpc", "http") and not _is_loopback(url.hostname or ""):
        raise ConfigError(
            f"reward endpoint: {address} has no TLS, and its key would be sent in clear",
            hint="use grpcs:// or https://, or run the kit on the server's host",
        )
    try:
        authorities = ca.read_bytes() if ca else None
        if is_http:
            return HttpTransport(address, key, ssl.create_default_context(cafile=ca) if url.scheme == "https" else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca}: {error}", hint="give a readable PEM file") from error
    return GrpcTransport(channels(url.netloc, authorities, tls=url.scheme == "grpcs"), key)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
