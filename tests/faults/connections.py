"""The process that holds a connection on this machine, as the kernel knows it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def socket_inode(port: int, to: int) -> str | None:
    """A client's connected socket, as the kernel numbers it; gRPC's are of IPv6 with IPv4 addresses.

    A client's port alone says nothing: the kernel gives it to connections with other ends at the same time.
    """
    for table, host in (("tcp", "0100007F"), ("tcp6", "0000000000000000FFFF00000100007F")):
        ends = [f"{host}:{port:04X}", f"{host}:{to:04X}"]
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1:3] == ends and fields[9] != "0":
                return fields[9]
    return None


def _sockets(pid: int) -> set[str]:
    """The targets of a process's descriptors."""
    found = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    found.add(os.readlink(entry.path))
                except OSError:
                    continue  # closed meanwhile
    except OSError:
        pass  # the process has ended
    return found


def holder_of(inode: str, pids: Iterable[int]) -> int | None:
    """The one of these processes that has a socket."""
    return next((pid for pid in pids if f"socket:[{inode}]" in _sockets(pid)), None)
