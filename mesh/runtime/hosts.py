"""Addresses and memory that belong to one machine alone."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

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


def host_id() -> str:
    """Identity of the machine and IPC namespace: equal for two processes that may share memory.

    Two containers of one machine differ unless they were given the same IPC namespace. Where the kernel tells neither
    (not Linux), the host name stands in. Equality is a hint: a receiver falls back where the shared file is not there.
    """
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()}/{os.readlink(_IPC_NAMESPACE)}"
    except OSError:
        return socket.gethostname()
