"""The place where ranks of several machines meet, and what is said where they cannot."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest

from rollmesh.learner.engines.rendezvous import open_board, open_store
from rollmesh.mesh.errors import ConfigError, PortInUseError, UnreachableError
from rollmesh.mesh.runtime.ranks import MEETING, Node, environment_on

SHORT = timedelta(seconds=1)


def _become(rank: int, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {name: value for name, value in os.environ.items() if name != MEETING}
    monkeypatch.setattr(os, "environ", environment | environment_on(Node(rank, 2, address), 0, 2))


def test_a_place_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        _become(1, address, monkeypatch)
        with pytest.raises(UnreachableError, match=rf"rank 1 on .* does not reach .* at {address} within 1 s"):
            open_board(SHORT)
        taken.listen()
        _become(0, address, monkeypatch)
        with pytest.raises(PortInUseError, match=rf"cannot listen at {address}"):
            open_store(SHORT)
    # An address of no machine (RFC 5737).
    _become(0, "192.0.2.1:29500", monkeypatch)
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:29500.*learner\.distributed\.rendezvous"):
        open_board(SHORT)


def test_store_and_board_share_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    _become(0, address, monkeypatch)
    board = open_board(SHORT)
    store = open_store(timedelta(seconds=2))
    assert board is not None
    assert store is not None
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert board.read([0, 1]) == {}
