"""Ports that a configuration names, and who has them already."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import psutil

from rollmesh.doctor.findings import Finding, ok, problem
from rollmesh.mesh.config.models import Config

CHECK = "ports"


@dataclass(frozen=True, slots=True)
class Bind:
    """An attempt to bind a port.

    Attributes:
        key: of the configuration.
        host, port: as configured.
        error: why it cannot be bound; empty where it can.
        holder: process that listens there, in words; empty: not known.
    """

    key: str
    host: str
    port: int
    error: str = ""
    holder: str = ""


def check_ports(config: Config) -> Iterator[Finding]:
    """Ports that services of this machine will bind."""
    yield from judge([try_bind(key, host, port) for key, (host, port) in configured(config).items()])


def configured(config: Config) -> Mapping[str, tuple[str, int]]:
    """Addresses with a port of their own, by key; any free port is none."""
    network, rollout = config.network, config.rollout
    endpoint = rollout.endpoint.port if rollout.endpoint.enabled or rollout.agent.kind == "program" else 0
    found = {
        "network.port": (network.host, network.port),
        "network.metrics_port": (network.metrics_host, network.metrics_port if network.metrics else 0),
        "rollout.endpoint.port": (network.host, endpoint),
    }
    return {key: address for key, address in found.items() if address[1]}


def try_bind(key: str, host: str, port: int) -> Bind:
    """Binds a port for a moment, as the service would."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind)) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen(1)
    except OSError as error:
        return Bind(key, host, port, error.strerror or str(error), _holder(port))
    return Bind(key, host, port)


def judge(binds: list[Bind]) -> Iterator[Finding]:
    """Says which ports cannot be had; two keys with one port cannot both have it."""
    taken: dict[int, str] = {}
    for bind in binds:
        if bind.error:
            by = f", by {bind.holder}" if bind.holder else ""
            yield problem(
                CHECK,
                f"{bind.key}: {bind.host}:{bind.port} cannot be bound: {bind.error}{by}",
                f"end that process, or set {bind.key} to another port, or to 0 for any free one",
                port=bind.port,
            )
        elif bind.port in taken:
            yield problem(
                CHECK,
                f"{bind.key} and {taken[bind.port]} are both {bind.port}",
                f"set {bind.key} to another port, or to 0 for any free one",
                port=bind.port,
            )
        taken[bind.port] = bind.key
    if not any(bind.error for bind in binds) and len(taken) == len(binds):
        yield ok(
            CHECK, ", ".join(f"{bind.key} {bind.port} is free" for bind in binds) or "services take any free ports"
        )


def _holder(port: int) -> str:
    """The process that listens at a port, as far as this user may know."""
    try:
        pids = {
            c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"
        }
        names = [f"{psutil.Process(pid).name()} (pid {pid})" for pid in pids if pid is not None]
    except psutil.Error:
        return ""
    return " and ".join(names)
