"""A second host on this machine: a network namespace behind a link of a given rate.

Needs root, Debian's iproute2 (`ip`, `tc`) and a kernel with veth and tbf. Namespaces and links end with the context.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_BURST_BYTES = 256 << 10
_QUEUE_MS = 50


@dataclass(frozen=True, slots=True)
class FarHost:
    """The other end of a link.

    Attributes:
        near: this side's address.
        namespace: of the other side.
    """

    near: str
    namespace: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs over there."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


@contextmanager
def far_host(bits_per_s: float, *, number: int = 0) -> Iterator[FarHost]:
    """A host behind a link that carries `bits_per_s` each way; `number` (0 to 63) tells several apart."""
    namespace, near, far = (f"rm{os.getpid()}{end}{number}" for end in ("ns", "a", "b"))
    network = f"10.213.{number}"
    shape = ["tbf", "rate", f"{int(bits_per_s)}bit", "burst", f"{_BURST_BYTES}b", "latency", f"{_QUEUE_MS}ms"]
    _run("ip", "netns", "add", namespace)
    try:
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", namespace)
        _run("ip", "addr", "add", f"{network}.1/24", "dev", near)
        _run("ip", "link", "set", near, "up")
        _run("ip", "-n", namespace, "addr", "add", f"{network}.2/24", "dev", far)
        _run("ip", "-n", namespace, "link", "set", far, "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("tc", "qdisc", "add", "dev", near, "root", *shape)
        _run("tc", "-n", namespace, "qdisc", "add", "dev", far, "root", *shape)
        yield FarHost(f"{network}.1", namespace)
    finally:
        # The link goes with its namespace.
        _run("ip", "netns", "del", namespace)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=10)
