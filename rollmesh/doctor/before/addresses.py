"""Addresses under which services call one another: they resolve, and lead off this machine where they have to.

Proxies of the environment are among this: gRPC sends its connections to them, unless the host is excepted.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rollmesh.doctor.findings import Finding, ok, problem, warning
from rollmesh.mesh.addresses import host_of, is_unspecified
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.reward_service.routing import split_routes, target_of

ADDRESSES, PROXIES = "addresses", "proxies"
# In the order in which gRPC looks for them.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True, slots=True)
class AddressFacts:
    """The addresses of a configuration, resolved.

    Attributes:
        host: to which services bind.
        advertised: name or address that others are told, and the key that it comes from.
        resolved: addresses of each name; empty where it does not resolve.
        protected: services off loopback need a token, and have one, or were allowed to be without.
    """

    host: str
    advertised: tuple[str, str]
    resolved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    protected: bool = True


def check_addresses(config: Config) -> Iterator[Finding]:
    """The bound and the advertised address."""
    yield from judge_addresses(gather(config))


def gather(config: Config) -> AddressFacts:
    """Resolves the names."""
    network, security = config.network, config.security
    if network.advertise:
        advertised = (host_of(network.advertise), "network.advertise")
    elif is_unspecified(network.host):
        advertised = (socket.gethostname(), "the host name, without network.advertise")
    else:
        advertised = (network.host, "network.host")
    names = {advertised[0], network.host}
    return AddressFacts(
        network.host,
        advertised,
        {name: resolve(name) for name in names},
        is_loopback(network.host) or security.token_file is not None or security.allow_insecure,
    )


def resolve(name: str) -> tuple[str, ...]:
    """IP addresses of a host; empty where there are none."""
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def judge_addresses(facts: AddressFacts) -> Iterator[Finding]:
    """Says which address others cannot use."""
    name, origin = facts.advertised
    addresses = facts.resolved.get(name, ())
    reached_by_others = not is_loopback(facts.host)
    if not addresses:
        yield problem(
            ADDRESSES,
            f"{name} ({origin}) does not resolve: other services could not call this machine",
            "set network.advertise to an address of this machine that the others reach (`ip -brief address`)",
        )
    elif reached_by_others and all(map(is_loopback, addresses)):
        yield problem(
            ADDRESSES,
            f"services bind {facts.host}, and {name} ({origin}) is {', '.join(addresses)}, the caller's own machine",
            "set network.advertise to an address of this machine that the others reach (`ip -brief address`)",
            advertised=name,
        )
    else:
        yield ok(ADDRESSES, f"bound to {facts.host}, advertised as {name} ({', '.join(addresses)})")
    if not facts.protected:
        yield problem(
            ADDRESSES,
            f"network.host is {facts.host}, which others reach, and there is no token",
            "`rollmesh token new --out token`, and security.token_file=token on every node",
        )


def check_proxies(config: Config) -> Iterator[Finding]:
    """Proxies that would take the mesh's connections."""
    yield from judge_proxies(os.environ, called(config))


def called(config: Config) -> list[str]:
    """Hosts that services of a configuration call over gRPC, without this machine's loopback."""
    network = config.network
    routed = split_routes(config.reward.by_data_source)[1].values()
    hosts = [network.advertise or ("" if is_unspecified(network.host) else network.host)]
    hosts += map(target_of, (*config.reward.endpoints, *chain.from_iterable(routed)))
    found = dict.fromkeys(map(host_of, hosts))
    return [host for host in found if host and not is_loopback(host)]


def judge_proxies(environment: Mapping[str, str], hosts: Sequence[str]) -> Iterator[Finding]:
    """Says which hosts a proxy stands before.

    Args:
        environment: variables of the services.
        hosts: that they call.
    """
    variable = next((name for name in _PROXIES if environment.get(name)), "")
    exceptions = next((environment[name] for name in _EXCEPTIONS if environment.get(name)), "")
    by_proxy = [host for host in hosts if not _excepted(host, exceptions)]
    if not variable:
        yield ok(PROXIES, "gRPC uses no proxy")
    elif by_proxy:
        listed = ",".join(filter(None, (exceptions, *by_proxy)))
        yield problem(
            PROXIES,
            f"{variable} is set, and gRPC would call {', '.join(by_proxy)} through that proxy",
            f"export no_proxy={listed} (or no_grpc_proxy, for gRPC alone) wherever services start",
            variable=variable,
        )
    elif not hosts:
        yield warning(
            PROXIES,
            f"{variable} is set: gRPC calls hosts through that proxy, unless no_proxy names them",
            "export no_grpc_proxy with the hosts of the mesh before services of several hosts start",
            variable=variable,
        )
    else:
        yield ok(PROXIES, f"{variable} is set, and no_proxy excepts {', '.join(hosts)}")


def _excepted(host: str, exceptions: str) -> bool:
    """True where gRPC connects directly: the host ends with an exception, or lies in a network that is one."""
    for exception in filter(None, (part.strip() for part in exceptions.split(","))):
        if exception == "*" or host.lower().endswith(exception.lower().lstrip("*")):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(exception, strict=False):
                return True
        except ValueError:
            continue
    return False
