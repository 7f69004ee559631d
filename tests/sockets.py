"""The sockets on which a process tree listens: everybody on the network reaches those that are not on loopback."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that listens, or a UDP socket that takes what anybody sends."""

    program: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        ip = ipaddress.ip_address(self.address)
        return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def listeners(root: int) -> list[Listener]:
    """Those of a process and of all below it, in sessions of their own too."""
    found = []
    top = psutil.Process(root)
    for process in (top, *top.children(recursive=True)):
        # It may end while it is looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            program = " ".join(process.cmdline())[-120:]
            found += [
                Listener(program, connection.laddr.ip, connection.laddr.port)
                for connection in process.net_connections("inet")
                if connection.laddr
                and not connection.raddr
                and (connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM)
            ]
    return found


def assert_on_loopback(root: int, *, at_least: int = 1) -> None:
    """No one on another machine reaches any of them; there are so many, or the question was asked too early."""
    found = listeners(root)
    assert len(found) >= at_least, found
    assert [listener for listener in found if not listener.on_loopback] == []
