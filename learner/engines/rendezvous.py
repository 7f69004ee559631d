"""The store in which the learner's processes meet, and the board on which they say that they are there.

Invariants: the ranks of one machine meet in a file of a private folder. Those of several meet in a TCP store, which
listens at the one address that was named for it; a process makes it once. Values in it are bytes that torch writes and
reads, never pickles. Under torchrun its own store is used, which listens on all addresses.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rollmesh.mesh.errors import ConfigError, PortInUseError, UnreachableError
from rollmesh.mesh.runtime.rank_board import BOARD, FileBoard, RankBoard, RankState
from rollmesh.mesh.runtime.ranks import MEETING, on_loopback, under_torchrun, world_size

# Longest wait for one answer of a store that is there.
_ANSWER = timedelta(seconds=30)
_BACKLOG = 4096
# By address: the one who listens does so once.
_made: dict[tuple[str, int], dist.TCPStore] = {}


def open_store(timeout: timedelta) -> dist.Store | None:
    """The store for a process group; None: torch finds it by torchrun's environment.

    Args:
        timeout: longest wait for another process to come.

    Raises:
        ConfigError: the address of the ranks' meeting place is not one of rank 0's machine.
        PortInUseError: another program has it.
        UnreachableError: rank 0 does not come.
    """
    size = world_size()
    if size == 1 or MEETING in os.environ:
        os.environ.update(on_loopback())
    if size == 1:
        return dist.HashStore()
    if MEETING in os.environ:
        store: dist.Store = dist.FileStore(os.environ[MEETING], size)
    elif under_torchrun():
        return None
    else:
        store = _tcp_store(timeout)
    store.set_timeout(timeout)
    return store


def open_board(timeout: timedelta) -> RankBoard | None:
    """The board of the ranks; None where there is one alone."""
    if world_size() == 1:
        return None
    if MEETING in os.environ:
        return FileBoard(Path(os.environ[MEETING]).with_name(BOARD))
    # A connection of its own: waits of process groups hold theirs.
    own = _connect(timeout) if under_torchrun() else _tcp_store(timeout).clone()  # type: ignore[attr-defined]  # missing in its stub
    own.set_timeout(_ANSWER)
    return _StoreBoard(dist.PrefixStore(f"{BOARD}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", own))


def _tcp_store(timeout: timedelta) -> dist.TCPStore:
    address = _address()
    if address not in _made:
        _made[address] = _listen(timeout) if os.environ["RANK"] == "0" else _connect(timeout)
    return _made[address]


def _listen(timeout: timedelta) -> dist.TCPStore:
    host, port = _address()
    try:
        ((family, kind, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        # A learner that is just ending frees the port soon.
        kind_of = PortInUseError if error.errno == errno.EADDRINUSE else ConfigError
        raise kind_of(
            f"cannot listen at {host}:{port}, where the ranks are to meet: {error}",
            hint="set learner.distributed.rendezvous (or MASTER_ADDR and MASTER_PORT) to a free port of node 0",
        ) from error
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _connect(timeout: timedelta) -> dist.TCPStore:
    host, port = _address()
    try:
        return dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise UnreachableError(
            f"rank {os.environ['RANK']} on {socket.gethostname()} does not reach the ranks' meeting place at "
            f"{host}:{port} within {timeout.total_seconds():.0f} s: {error}",
            hint="start node 0 too, and look at learner.distributed.rendezvous and the firewall",
        ) from error


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"].strip("[]"), int(os.environ["MASTER_PORT"])


class _StoreBoard:
    """A board in a store over TCP, which rank 0 or torchrun holds.

    Args:
        store: over a connection of its own.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._written: set[int] = set()

    def write(self, rank: int, state: RankState) -> None:
        """See RankBoard."""
        try:
            self._store.set(str(rank), state.encode().decode())
        except dist.DistError as error:
            raise ConnectionError(str(error)) from error

    def read(self, ranks: Sequence[int]) -> dict[int, RankState]:
        """See RankBoard."""
        try:
            # To get a value that is not there would wait for it.
            self._written |= {rank for rank in ranks if rank not in self._written and self._store.check([str(rank)])}
            known = [rank for rank in ranks if rank in self._written]
            values = self._store.multi_get([str(rank) for rank in known]) if known else []
        except dist.DistError as error:
            raise ConnectionError(str(error)) from error
        states = zip(known, map(RankState.decode, values), strict=True)
        return {rank: state for rank, state in states if state is not None}
