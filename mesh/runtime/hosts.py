"""Addresses and memory that belong to one machine alone."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_IPC_NAMESPACE = Path("/proc/self/ns/ipc")


def is_loopback(host: str) -> bool:
    """True if an address to bind stays on this machine."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def own_address_to(host: str) -> str | None:
    """This machine's address on the route to a host; None: there is no route, or no such host."""
    try:
        ((family, kind, _, _, address), *_) = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of datagrams: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_to(host: str) -> str | None:
    """Name of the network interface over which a host is reached; None: there is no route, or no such host."""
    own = own_address_to(host)
    if own is None:
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(a.address.split("%")[0] == own for a in addresses)), None)


def host_id() -> str:
    """Identity of the machine and IPC namespace: equal for two processes that may share memory.

    Two containers of one machine differ unless they were given the same IPC namespace. Where the kernel reports neither
    (not Linux), the host name stands in. Equality is a hint: a receiver falls back where the shared file is not there.
    """
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()}/{os.readlink(_IPC_NAMESPACE)}"
    except OSError:
        return socket.gethostname()
