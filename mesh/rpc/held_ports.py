"""The ports of a run's services, held by their launcher until the run ends.

A service that ends leaves its port free, and others still call it there. A stranger that took the port would receive
their credentials, and could send rewards or weights.

Invariants: the sockets that hold a port never listen, so that callers are refused while its service is away. Only
processes of the same user can bind the same ports (`SO_REUSEPORT`), and of those only the services of such a run.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from types import MappingProxyType, TracebackType

from rollmesh.mesh.errors import PortInUseError

# Informs a service that its port is held by its launcher.
ENVIRONMENT = MappingProxyType({"ROLLMESH_PORT_IS_HELD": "1"})


def is_held() -> bool:
    """True if this process was started with its port held."""
    return ENVIRONMENT.items() <= os.environ.items()


class HeldPorts:
    """Ports at one address. A context manager: its end releases them.

    Args:
        host: address that the services bind.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._held = ExitStack()

    def hold(self, port: int = 0) -> int:
        """Holds one more port, and returns it.

        Args:
            port: 0 picks a free one.

        Raises:
            PortInUseError: another program has it, or the host cannot be bound.
        """
        try:
            return self._hold(port)
        except OSError as error:
            raise PortInUseError(
                f"cannot bind {self._host}, port {port}: {os.strerror(error.errno) if error.errno else error}",
                hint="set network.port to another one, 0 for any free one; network.host to an address of this machine",
            ) from error

    def _hold(self, port: int) -> int:
        host = self._host.strip("[]")
        for family, *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            # First without SO_REUSEPORT: another run of this user would let a further socket bind its port.
            with socket.socket(family, socket.SOCK_STREAM) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((address[0], port, *address[2:]))
                port = alone.getsockname()[1]
            held = self._held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((address[0], port, *address[2:]))
        return port

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
