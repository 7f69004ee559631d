"""A worker process: loads reward functions once, then scores units until its owner hangs up.

Invariants: it imports no gRPC, no torch and nothing else that the functions do not ask for. Their output goes to
standard error, which is the service's log. The page shows the unit that a function is busy with, whatever it does.
Plain functions run in the main thread with no event loop around them, so that signals and `asyncio.run` work in them.
The first unit of a coroutine function turns the worker into an event loop for the rest of its life.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.runtime.log_format import LogSettings, setup_logging
from rollmesh.reward_service.functions import RewardFunction
from rollmesh.reward_service.loading import load_function
from rollmesh.reward_service.scorers import prepare
from rollmesh.reward_service.workers.messages import DONE, READY, REFUSED, pack, unpacker
from rollmesh.reward_service.workers.shared_page import SharedPage
from rollmesh.reward_service.workers.units import READ_BYTES, Unit, answer_of, parse

# Seconds and bytes after which answers leave although the message's units are not all done.
_FLUSH_S = 0.02
_FLUSH_BYTES = 1 << 20
# A timer that one unit has set must not go off in the next.
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# Option of `prctl`: orphans become children of this process.
_PR_SET_CHILD_SUBREAPER = 36


class _Channel:
    """The socket to the owner, blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._stream = unpacker()

    def receive(self) -> Any:
        """The next message; None once the owner has hung up."""
        while True:
            for message in self._stream:
                return message
            data = self.connection.recv(READ_BYTES)
            if not data:
                return None
            self._stream.feed(data)

    def send(self, message: Any) -> None:
        self.connection.sendall(pack(message))


def main() -> None:
    """Serves; the arguments are the descriptors of the socket and of the page."""
    connection_fd, page_fd = map(int, sys.argv[1:3])
    for descriptor in (connection_fd, page_fd):
        os.set_inheritable(descriptor, False)
    connection, page = socket.socket(fileno=connection_fd), SharedPage(page_fd)
    # A process that a function forks must not hide the end of this one from the owner.
    os.register_at_fork(after_in_child=connection.close)
    if sys.platform == "linux":  # processes that a function starts stay below this one, and its owner kills them all
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(OSError):  # where memory runs out, it is the worker that goes
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        _serve(_Channel(connection), page)
    except (BrokenPipeError, ConnectionResetError):  # the owner has ended
        return
    except BaseException:  # noqa: BLE001  # an interrupt that a function raises: the exit code comes before the hang-up
        traceback.print_exc()
        os._exit(1)


def _serve(channel: _Channel, page: SharedPage) -> None:
    if (first := channel.receive()) is None:
        return
    specs, tested, call_timeout_s, settings = first
    setup_logging("reward-worker", LogSettings(*settings))
    try:
        functions = [load_function(spec, name=name) for spec, name in specs]
        for spec, _ in specs:
            prepare(spec, tested=tested)
    except RewardError as error:
        channel.send([REFUSED, error.message, error.hint])
        return
    if any(function.asynchronous for function in functions):
        # Workers of plain functions start without all that it needs.
        from rollmesh.reward_service.workers import event_loop
    channel.send([READY, [astuple(function.kind) for function in functions]])
    while (message := channel.receive()) is not None:
        index, units = message
        if functions[index].asynchronous:
            event_loop.serve(channel.connection, page, functions, call_timeout_s, message)
            return
        _score_units(channel, page, functions[index], units)
        _reap_children()


def _reap_children() -> None:
    """Reaps processes that functions have left: as children of this process they would stay zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# ---------------------------------------------------------------------------------------------- plain functions


def _score_units(channel: _Channel, page: SharedPage, function: RewardFunction, units: Sequence[Unit]) -> None:
    done: list[tuple[int, bytes | None]] = []
    size, flushed = 0, time.monotonic()
    for unit, deadline, blobs in units:
        now = time.monotonic()
        if size > _FLUSH_BYTES or now - flushed > _FLUSH_S:
            channel.send([DONE, done])
            done, size, flushed = [], 0, now
        if unit <= page.recalled or now >= deadline:
            done.append((unit, None))
            continue
        page.begin(unit)
        items, outcomes = parse(blobs)
        scored = function.score(items) if items else []
        for timer in _TIMERS:
            signal.setitimer(timer, 0.0)
        answer = answer_of(items, outcomes, scored)
        page.idle()
        done.append((unit, answer))
        size += len(answer)
    channel.send([DONE, done])
