"""The connections between the ranks of a learner, which no proxy can stand in: ranks tell one another their ports.

The harness takes a second descriptor of each rank's end (`pidfd_getfd`, which needs the right to trace one's own
descendants). It does to the socket what the network could. A filter that drops every segment that arrives is a dead
link, which TCP repairs when it is lifted. A shutdown ends the connection on both sides.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

_PIDFD_GETFD = 438
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
# The classic BPF program `ret 0`: nothing of a segment is kept.
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)


def cut(one: psutil.Process, other: psutil.Process) -> int:
    """Ends every connection between two processes; returns how many ends there were."""
    with _ends(one, other) as ends:
        for end in ends:
            # Its process may be faster: it ends a connection whose other end has just been shut.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        return len(ends)


@contextmanager
def dead(one: psutil.Process, other: psutil.Process) -> Iterator[int]:
    """Nothing passes between two processes inside; gives the number of ends."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    filter_ = struct.pack("HL", len(_DROP_ALL) // 8, ctypes.addressof(program))
    with _ends(one, other) as ends:
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, filter_)
        try:
            yield len(ends)
        finally:
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


@contextmanager
def _ends(one: psutil.Process, other: psutil.Process) -> Iterator[list[socket.socket]]:
    """Second descriptors of all ends of the connections between two processes."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(_second(process.pid, connection.fd))
            for process, peer in ((one, other), (other, one))
            for connection in process.net_connections("tcp")
            if connection.raddr
            and any(
                (far.laddr, far.raddr) == (connection.raddr, connection.laddr) for far in peer.net_connections("tcp")
            )
        ]


def _second(pid: int, descriptor: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        found = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot reach socket {descriptor} of process {pid}: {os.strerror(code)}")
    return socket.socket(fileno=found)
