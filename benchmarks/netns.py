"""Further hosts on this machine: network namespaces with addresses of their own, on links that can be slowed and cut.

Needs root, Debian's iproute2 (`ip`, `tc`) and a kernel with veth, bridge and tbf. Namespaces and links end with the
context.
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
# Number of this process on a star.
_HERE = 254


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
    shape = _shaped(bits_per_s)
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


@dataclass(slots=True)
class StarHost:
    """A host on a network of several.

    Attributes:
        address, address6: its own of both families; they change with `move`.
        namespace: its name.
        port: of the switch, in `switch`.
    """

    address: str
    address6: str
    namespace: str
    port: str
    switch: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs over there."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def sent_bytes(self) -> int:
        """Bytes that have left over its link, headers and all."""
        shown = _output("ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth")
        sent: int = json.loads(shown)[0]["stats64"]["tx"]["bytes"]
        return sent

    def cut(self) -> None:
        """Takes its link down at the switch: nothing passes, and neither side is told."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def restore(self) -> None:
        """Puts the link up again."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "up")

    def shape(self, bits_per_s: float) -> None:
        """Makes the link carry `bits_per_s` each way."""
        for namespace, device in ((self.switch, self.port), (self.namespace, "eth")):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *_shaped(bits_per_s))

    def move(self, number: int) -> None:
        """Gives it the addresses of another number, which are free, in place of its own."""
        _run("ip", "-n", self.namespace, "addr", "flush", "dev", "eth", "scope", "global")
        self.address, self.address6 = _addresses(number)
        _give(self.namespace, "eth", number)


@contextmanager
def star(bits_per_s: float | None, hosts: int, *, here: bool = False) -> Iterator[list[StarHost]]:
    """The given number of hosts (up to 200) on one switch.

    Args:
        bits_per_s: that each link carries each way; None: as much as the kernel does.
        hosts: their number.
        here: this process is on the network too, at an address of its own.
    """
    switch = f"rm{os.getpid()}switch"
    with ExitStack() as stack:
        _run("ip", "netns", "add", switch)
        stack.callback(_run, "ip", "netns", "del", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        found = []
        for number in range(1, hosts + 1):
            host = StarHost(*_addresses(number), f"rm{os.getpid()}host{number}", f"port{number}", switch)
            _run("ip", "netns", "add", host.namespace)
            stack.callback(_run, "ip", "netns", "del", host.namespace)
            _plug(switch, host.port, "eth", "netns", host.namespace)
            _give(host.namespace, "eth", number)
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            if bits_per_s is not None:
                host.shape(bits_per_s)
            found.append(host)
        if here:
            device = f"rm{os.getpid()}here"
            _plug(switch, "porthere", device)
            stack.callback(_run, "ip", "link", "del", device)
            for address in _addresses(_HERE):
                _run("ip", "addr", "add", f"{address}/{_prefix(address)}", "dev", device, *_no_check(address))
            _run("ip", "link", "set", device, "up")
        yield found


def _addresses(number: int) -> tuple[str, str]:
    return f"10.214.0.{number}", f"fd14::{number:x}"


def _give(namespace: str, device: str, number: int) -> None:
    _run("ip", "-n", namespace, "link", "set", device, "up")
    for address in _addresses(number):
        _run(
            *("ip", "-n", namespace, "addr", "add", f"{address}/{_prefix(address)}", "dev", device),
            *_no_check(address),
        )


def _prefix(address: str) -> int:
    return 64 if ":" in address else 24


def _no_check(address: str) -> tuple[str, ...]:
    """IPv6 addresses are used at once: no one else has them here."""
    return ("nodad",) if ":" in address else ()


def _plug(switch: str, port: str, device: str, *where: str) -> None:
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", device, *(where or ("netns", "1")))
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")


def _shaped(bits_per_s: float) -> list[str]:
    return ["tbf", "rate", f"{int(bits_per_s)}bit", "burst", f"{_BURST_BYTES}b", "latency", f"{_QUEUE_MS}ms"]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, timeout=10, capture_output=True, text=True).stdout


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=10)
