"""The sockets on which a process tree listens: every host of the network reaches those that are not on loopback."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that listens, or a UDP socket that takes what any process sends."""

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
    family = {process.pid: process for process in (top, *top.children(recursive=True))}
    # All at once: the kernel walks its whole table for each question.
    for connection in psutil.net_connections("inet"):
        process = family.get(connection.pid)
        listens = connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
        if process is not None and connection.laddr and not connection.raddr and listens:
            # It may end while it is looked at.
            with contextlib.suppress(psutil.NoSuchProcess):
                program = " ".join(process.cmdline())[-120:]
                found.append(Listener(program, connection.laddr.ip, connection.laddr.port))
    return found


def ports(urls: Mapping[str, str]) -> set[int]:
    """Addresses of URLs by name."""
    found = {urlsplit(url).port for url in urls.values()}
    assert None not in found
    return {port for port in found if port is not None}


def assert_on_loopback(found: Collection[Listener], *, with_ports: Collection[int] = ()) -> None:
    """No one on another machine reaches any of them; these are among them, or the question was asked too early."""
    assert found
    assert set(with_ports) <= {listener.port for listener in found}, found
    assert [listener for listener in found if not listener.on_loopback] == []
