"""The address of a member as others are told it: one that they could not call is not told."""

from __future__ import annotations

import logging
import urllib.parse
from collections.abc import Callable

import psutil

from rollmesh.mesh.addresses import host_of
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.protos import membership_pb2 as pb

log = logging.getLogger(__name__)
_HINT = "give it --host or network.advertise: the address under which others reach its host"


def told_address(request: pb.JoinRequest, peer: str, own_hosts: Callable[[], set[str]] | None = None) -> str:
    """The address of a member that joins; empty where only its own host could call it.

    A generator works without one: others cannot drain it, ask it, or get weights from it.

    Args:
        request: with the address that the member gives.
        peer: where its call comes from, as gRPC writes it.
        own_hosts: gives the addresses of this host; None: those of its network interfaces.

    Raises:
        ConfigError: others must call the member, and cannot.
    """
    if not request.address or not is_loopback(host_of(request.address)):
        return request.address
    host = _host_of_peer(peer)
    if is_loopback(host) or host in (own_hosts or _own_hosts)():
        return request.address
    why = f"{request.member_id} joins from {host} with the address {request.address}, which only its own host can call"
    if request.role != pb.ROLE_GENERATOR:
        raise ConfigError(why, hint=_HINT)
    log.warning("%s: others cannot drain it, ask it, or get weights from it; to change that, %s", why, _HINT)
    return ""


def _host_of_peer(peer: str) -> str:
    """The host in `ipv4:10.0.0.5:4711` and `ipv6:%5B::1%5D:4711`; an IPv4 address within an IPv6 one stands alone."""
    if peer.startswith("unix:"):
        return "localhost"
    host = host_of(urllib.parse.unquote(peer.partition(":")[2]))
    return host.removeprefix("::ffff:").partition("%")[0]


def _own_hosts() -> set[str]:
    found = psutil.net_if_addrs().values()
    return {address.address.partition("%")[0] for addresses in found for address in addresses}
