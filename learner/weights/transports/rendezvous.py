"""The meeting point of a broadcast's members: a TCP store of the learner's.

Invariant: neither the store nor gloo and nccl know tokens or TLS; so all but loopback has to be allowed explicitly.
"""

from __future__ import annotations

from rollmesh.mesh.addresses import host_of
from rollmesh.mesh.config.network import NetworkSection, SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.mesh.runtime.service import advertised_address
from rollmesh.mesh.weights.rendezvous import open_store


class Rendezvous:
    """The store, and the address under which others reach it.

    Args:
        network: the address to bind, and the one for receivers.
        security: whether an address that others can reach is allowed.

    Attributes:
        store: for the learner's own use.
        address: host:port for receivers.

    Raises:
        ConfigError: an address that others can reach, without `security.allow_insecure`.
        WeightsError: it cannot be bound.
    """

    def __init__(self, network: NetworkSection, security: SecuritySection) -> None:
        if not is_loopback(network.host) and not security.allow_insecure:
            raise ConfigError(
                f"refusing to bind {network.host} for a broadcast of weights: it has neither token nor TLS",
                hint="set weights.transport: grpc, or security.allow_insecure: true on a private network",
            )
        self.store = open_store(network.host, network.rpc_timeout_s)
        # `advertise` may carry the port of another service.
        advertise = host_of(network.advertise) if network.advertise else None
        self.address = advertised_address(network.host, self.store.port, advertise)
        self.host = host_of(self.address)
