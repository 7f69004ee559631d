"""The link between two services does what it is told."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.faults.proxy import Conditions, Link, ProxyLoop

CLIENTS: dict[int, str] = {}


@pytest.fixture
def link() -> Iterator[Link]:
    """A link to a server that echoes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo(end: socket.socket) -> None:
            with end:
                try:
                    while data := end.recv(4096):
                        end.sendall(data)
                except OSError:
                    return

        def serve() -> None:
            try:
                while True:
                    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        loop = ProxyLoop()
        made = loop.link(server.getsockname()[1], lambda port, _to: CLIENTS.get(port, ""))
        yield made
        made.close()
        loop.close()


def client(link: Link, timeout: float | None = None) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), timeout=timeout)


def asks(end: socket.socket, data: bytes = b"hello") -> bytes:
    end.sendall(data)
    found = b""
    while len(found) < len(data):
        found += end.recv(4096)
    return found


def test_a_good_link_passes_bytes_in_order(link: Link) -> None:
    with client(link) as end:
        data = bytes(range(256)) * 2000
        threading.Thread(target=end.sendall, args=(data,), daemon=True).start()
        found = b""
        while len(found) < len(data):
            found += end.recv(65536)
        assert found == data


def test_a_cut_resets_old_and_new_connections_until_it_is_healed(link: Link) -> None:
    with client(link) as end:
        assert asks(end) == b"hello"
        link.apply("*", Conditions("cut"))
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    with pytest.raises(OSError), client(link) as refused:  # noqa: PT011  # reset on connect or on the first read
        if not refused.recv(1):
            raise ConnectionResetError
    link.apply("*", Conditions())
    with client(link) as end:
        assert asks(end) == b"hello"


def test_a_black_hole_keeps_connections_and_passes_what_it_held_when_it_is_healed(link: Link) -> None:
    with client(link) as end:
        assert asks(end) == b"hello"
        link.apply("*", Conditions("blackhole"))
        end.sendall(b"later")
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(1)
        link.apply("*", Conditions())
        end.settimeout(None)
        assert end.recv(5) == b"later"


def test_delay_and_bandwidth_cost_what_they_say(link: Link) -> None:
    with client(link) as end:
        link.apply("*", Conditions(delay_s=0.1))
        began = time.monotonic()
        assert asks(end) == b"hello"
        assert time.monotonic() - began >= 0.2, "once on the way there, once on the way back"
        link.apply("*", Conditions(bytes_per_s=20_000))
        began = time.monotonic()
        asks(end, bytes(4000))
        assert time.monotonic() - began >= 0.15, "four pieces with a wait after each"


def test_a_rule_for_one_client_leaves_the_others_alone(link: Link) -> None:
    link.apply("generator-0", Conditions("blackhole"))
    assert link.conditions("generator-0-3").mode == "blackhole"
    assert link.conditions("generator-1-0").mode == "open"
    with socket.socket() as early:
        early.bind(("127.0.0.1", 0))
        CLIENTS[early.getsockname()[1]] = "generator-0-3"
        early.connect(("127.0.0.1", link.port))
        early.sendall(b"hello")
        early.settimeout(0.2)
        with pytest.raises(TimeoutError):
            early.recv(5)
        with client(link) as other:
            assert asks(other) == b"hello"
        link.apply("generator-0", Conditions())
        early.settimeout(None)
        assert early.recv(5) == b"hello"
