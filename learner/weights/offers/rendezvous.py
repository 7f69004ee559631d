"""Where the members of a broadcast meet: a TCP store of the learner's.

Invariant: it listens on the address it is told, on no other; torch would listen on all. Neither the store nor gloo and
nccl know tokens or TLS, so anything but loopback has to be allowed explicitly.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from mesh.config.models import NetworkSection, SecuritySection
from mesh.errors import ConfigError, WeightsError
from mesh.rpc import is_loopback
from mesh.service import advertised_address


class Rendezvous:
    """The store, and the address under which others reach it.

    Args:
        network: where to bind, and what to tell others.
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
                f"refusing to bind {network.host} for a broadcast of weights: it knows neither token nor TLS",
                hint="set weights.transport: grpc, or security.allow_insecure: true on a network of your own",
            )
        host = network.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.bind((host, 0))
            listener.listen()
        except OSError as error:
            listener.close()
            raise WeightsError(f"cannot bind {host} for a broadcast of weights: {error.strerror}") from error
        port = listener.getsockname()[1]
        # The store takes the socket over, and talks to itself by this address.
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  compared, not bound
        self.store = TCPStore(
            own,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=network.rpc_timeout_s),
            master_listen_fd=listener.detach(),
        )
        # `advertise` may carry the port of another service.
        advertise = network.advertise.rpartition(":")[0] or network.advertise if network.advertise else None
        self.address = advertised_address(network.host, port, advertise)
        self.host = self.address.rpartition(":")[0].strip("[]")
