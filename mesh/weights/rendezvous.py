"""The TCP stores in which the members of a broadcast meet.

Invariant: a store listens on the given address alone. Torch's own would listen on all addresses, and any program that
reaches it may write into it: it knows neither tokens nor TLS.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from rollmesh.mesh.addresses import host_of, split_address
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.runtime.hosts import own_address_to
from rollmesh.mesh.weights.broadcast import LONGEST_STALL_S


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Opens a store on a free port, which it knows as `port`.

    Args:
        host: to listen on.
        timeout_s: of its calls.

    Raises:
        WeightsError: it cannot be bound.
    """
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise WeightsError(f"cannot bind {host} for a broadcast of weights: {error.strerror}") from error
    # The store takes the socket over, and talks to itself by this address.
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  compared, not bound
    return TCPStore(
        own,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, timeout_s: float) -> TCPStore:
    """Connects to a store that another process has opened.

    Raises:
        WeightsError: it does not answer.
    """
    host, port = split_address(address)
    timeout = timedelta(seconds=min(timeout_s, LONGEST_STALL_S))
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise WeightsError(
            f"the rendezvous at {address} does not answer: {str(error).partition(chr(10))[0]}"
        ) from error


def own_host(address: str) -> str:
    """Address of the interface of this host by which another one is reached.

    Raises:
        WeightsError: there is no way there.
    """
    if (own := own_address_to(host_of(address))) is None:
        raise WeightsError(f"there is no route to {address}")
    return own
