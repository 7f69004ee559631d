"""Processes are started again, and the one at the other end of a connection is found."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.processes import Launch, Supervisor
from tests.faults.proxy import ProxyLoop
from tests.faults.world import START_S

# Connects to the port given, through IPv4 or as gRPC does, and says what it hears.
CLIENT = """
import socket, sys, pathlib
end = socket.socket(socket.AF_INET6 if sys.argv[1] == "6" else socket.AF_INET)
end.connect(("::ffff:127.0.0.1" if sys.argv[1] == "6" else "127.0.0.1", int(sys.argv[2])))
pathlib.Path(sys.argv[3]).touch()
end.recv(1)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path)
    yield made
    made.close()
    assert all(process.ended.is_set() for process in made.processes)


@pytest.mark.parametrize("family", ["4", "6"])
def test_the_process_behind_a_connection_is_known(supervisor: Supervisor, tmp_path: Path, family: str) -> None:
    clients: list[str] = []
    loop = ProxyLoop()

    def who(port: int, to: int) -> str:
        assert supervisor.owner(port, to + 1) == "", "the port belongs to this connection, not to every one from it"
        clients.append(supervisor.owner(port, to))
        return clients[-1]

    link = loop.link(1, who)  # nothing answers through it, which does not matter here
    ready = tmp_path / "ready"
    launch = Launch([sys.executable, "-c", CLIENT, family, str(link.port), str(ready)], {}, ready)
    supervisor.add("client", lambda _index: launch)
    supervisor.wait_ready("client", START_S)
    supervisor.processes[0].ended.wait()
    link.close()
    loop.close()
    assert clients[0] == "client-0"


def test_what_is_killed_comes_back_and_what_is_retired_stays_away(supervisor: Supervisor) -> None:
    supervisor.add("sleeper", lambda _index: Launch(["sleep", "1000"], {}))
    first = supervisor.current("sleeper")
    assert first is not None
    supervisor.kill9("sleeper")
    assert first.code == -signal.SIGKILL
    supervisor.wait_ready("sleeper", START_S)
    second = supervisor.current("sleeper")
    assert second is not None
    assert second.name == "sleeper-1"
    old, third = supervisor.succeed("sleeper")
    assert old is second
    assert not old.ended.is_set(), "the one that is superseded goes on"
    supervisor.retire("sleeper", START_S)
    assert third.code == -signal.SIGTERM
    assert len(supervisor.processes) == 3
