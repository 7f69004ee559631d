"""Addresses `host:port`, the one place where they are taken apart and put together.

Invariant: an IPv6 literal has brackets wherever a port may follow it, and none where a host stands alone.
"""

from __future__ import annotations

import ipaddress

from rollmesh.mesh.errors import ConfigError

_HINT = "as in 10.0.0.5:7400, node1:7400 or [2001:db8::5]:7400"
_PORTS = range(1, 1 << 16)
_SCHEME = "grpc://"


def split_address(address: str, what: str = "address") -> tuple[str, int]:
    """Host, without brackets, and port of `host:port` or `grpc://host:port`.

    Args:
        what: names the setting in errors.

    Raises:
        ConfigError: of another form, or no port that can be called.
    """
    host, colon, port = address.strip().removeprefix(_SCHEME).rpartition(":")
    bare = _without_brackets(host)
    if not colon or not bare:
        raise ConfigError(f"{what} {address!r} is not host:port", hint=_HINT)
    if ":" in host and bare == host:
        raise ConfigError(f"{what} {address!r}: an IPv6 address with a port needs brackets", hint=_HINT)
    if not port.isdecimal() or int(port) not in _PORTS or "/" in host:
        raise ConfigError(f"{what} {address!r} is not host:port, with a port from 1 to 65535", hint=_HINT)
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 literal, which may have them already."""
    bare = _without_brackets(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def addresses_of(mesh: str) -> list[str]:
    """The addresses in `host:port` or `host:port,host:port,...`, each of them once.

    Raises:
        ConfigError: there is no address, or one of another form.
    """
    found = [join_address(*split_address(part, "mesh address")) for part in mesh.split(",")]
    return list(dict.fromkeys(found))


def host_of(address: str) -> str:
    """Host, without brackets, of `host:port` or of a host alone."""
    address = address.strip().removeprefix(_SCHEME)
    if _is_literal(address) or ":" not in address.rpartition("]")[2]:
        return _without_brackets(address)
    return _without_brackets(address.rpartition(":")[0])


def with_port(text: str, port: int) -> str:
    """`host:port` as it is; a host alone gets the port."""
    host = host_of(text)
    return join_address(host, port) if host == _without_brackets(text) else text


def is_unspecified(host: str) -> bool:
    """True if a host to bind stands for all addresses of this machine."""
    try:
        return ipaddress.ip_address(_without_brackets(host)).is_unspecified
    except ValueError:
        return False


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(_without_brackets(host))
    except ValueError:
        return False
    return True


def _without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
