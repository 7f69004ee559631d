"""Further hosts on this machine: network namespaces on links of a given rate.

Needs root, Debian's iproute2 (`ip`, `tc`) and a kernel with veth and tbf. Namespaces and links end with the context.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_BURST_BYTES = 256 << 10
_QUEUE_MS = 50


@dataclass(frozen=True, slots=True)
class FarHost:
    """The other end of a link.

    Attributes:
        near: this side's address.
        far: the other side's.
        namespace: of the other side.
    """

    near: str
    far: str
    namespace: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs over there."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


@contextmanager
def far_host(bits_per_s: float, *, number: int = 0) -> Iterator[FarHost]:
    """A host on a link that carries `bits_per_s` each way; `number` (0 to 63) tells several apart."""
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
        yield FarHost(f"{network}.1", f"{network}.2", namespace)
    finally:
        # The link goes with its namespace.
        _run("ip", "netns", "del", namespace)


@dataclass(frozen=True, slots=True)
class StarHost:
    """A host on a network of several.

    Attributes:
        address: its own.
        namespace: its name.
    """

    address: str
    namespace: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs over there."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def sent_bytes(self) -> int:
        """Bytes that have left over its link, headers and all."""
        shown = _output("ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth")
        sent: int = json.loads(shown)[0]["stats64"]["tx"]["bytes"]
        return sent


@contextmanager
def star(bits_per_s: float, hosts: int) -> Iterator[list[StarHost]]:
    """The given number of hosts (up to 250) on one switch, each on a link that carries `bits_per_s` each way."""
    shape = ["tbf", "rate", f"{int(bits_per_s)}bit", "burst", f"{_BURST_BYTES}b", "latency", f"{_QUEUE_MS}ms"]
    switch = f"rm{os.getpid()}switch"
    with ExitStack() as stack:
        _run("ip", "netns", "add", switch)
        stack.callback(_run, "ip", "netns", "del", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        found = []
        for number in range(1, hosts + 1):
            host, port = StarHost(f"10.214.0.{number}", f"rm{os.getpid()}host{number}"), f"port{number}"
            _run("ip", "netns", "add", host.namespace)
            stack.callback(_run, "ip", "netns", "del", host.namespace)
            _run(
                "ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth", "netns", host.namespace
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth")
            _run("ip", "-n", host.namespace, "link", "set", "eth", "up")
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            _run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", *shape)
            _run("tc", "-n", host.namespace, "qdisc", "add", "dev", "eth", "root", *shape)
            found.append(host)
        yield found


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, timeout=10, capture_output=True, text=True).stdout


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=10)
