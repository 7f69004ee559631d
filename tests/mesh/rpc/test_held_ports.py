"""No other process answers where a run's service is for a moment away."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import PortInUseError
from rollmesh.mesh.rpc.held_ports import ENVIRONMENT, HeldPorts
from rollmesh.mesh.rpc.server import bind, new_server

HOST = "127.0.0.1"
_BIND = (
    "import socket, sys\n"
    "taker = socket.socket()\n"
    "for option in sys.argv[2:]:\n"
    "    taker.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)\n"
    "taker.bind((sys.argv[1].split(':')[0], int(sys.argv[1].split(':')[1])))\n"
    "taker.listen()\n"
)


@pytest.fixture
def port() -> Iterator[int]:
    with HeldPorts(HOST) as held:
        first, second = held.hold(), held.hold()
        assert first != second
        yield first


async def test_a_service_that_is_told_so_answers_there_again_and_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = SecuritySection()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))
        server = new_server(security)
        assert bind(server, HOST, port, security) == port
        await server.start()
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
            await channel.channel_ready()
        await server.stop(0)


async def test_any_other_service_is_refused(port: int) -> None:
    with pytest.raises(PortInUseError):
        bind(new_server(SecuritySection()), HOST, port, SecuritySection())


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize("address", [HOST, "0.0.0.0"])
@pytest.mark.parametrize("options", [(), ("SO_REUSEADDR",), ("SO_REUSEADDR", "SO_REUSEPORT")], ids=str)
def test_another_user_does_not_get_in(port: int, address: str, options: tuple[str, ...]) -> None:
    def take(address: str) -> subprocess.CompletedProcess[str]:
        stranger = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        command = [*stranger, sys.executable, "-c", _BIND, address, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, cwd="/")

    assert "Address already in use" in take(f"{address}:{port}").stderr
    assert take(f"{address}:0").returncode == 0, "it may bind what is free"


def test_a_port_that_someone_has_is_told_of(port: int) -> None:
    with HeldPorts(HOST) as another, socket.create_server((HOST, 0)) as taken:
        for number in (port, taken.getsockname()[1]):
            with pytest.raises(PortInUseError, match="in use"):
                another.hold(number)


def test_they_are_let_go_at_the_end() -> None:
    with HeldPorts(HOST) as held:
        port = held.hold()
    with socket.create_server((HOST, port)):
        pass


def test_a_host_of_another_machine_is_told_of() -> None:
    with HeldPorts("192.0.2.1") as held, pytest.raises(PortInUseError, match=r"192\.0\.2\.1"):
        held.hold()
