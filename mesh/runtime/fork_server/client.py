"""The client of a server that forks processes: it owns the server, and adopts what that forks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from rollmesh.mesh.liveness.process_ends import descendants
from rollmesh.mesh.liveness.process_state import is_stopped
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.fork_server import server
from rollmesh.mesh.runtime.fork_server.decision import can_fork
from rollmesh.mesh.runtime.fork_server.forked import ForkedProcess, can_fork_here, ends_within, has_one_thread
from rollmesh.mesh.runtime.fork_server.surroundings import has_drifted, surroundings
from rollmesh.mesh.runtime.threads import thread_environment

log = logging.getLogger(__name__)
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
# Imports from a slow disk take their time; an order is a matter of milliseconds.
_LOADED_S, _ORDER_S = 180.0, 30.0
# A wait is reported once it has lasted so long; meanwhile the server's state is looked at in such intervals.
_SLOW_S, _LOOK_EVERY_S = 20.0, 1.0
# Several servers are possible, and their client adopts for one at a time.
_adoption = threading.Lock()


class ForkServer:
    """A server that this process owns; a context manager. A forked server imports its modules on `load()`.

    Args:
        process: of the server.
        orders: the connection to it.
        environment: in which it loads its modules.
    """

    def __init__(
        self, process: ForkedProcess | subprocess.Popen[bytes], orders: socket.socket, environment: Mapping[str, str]
    ) -> None:
        self._process = process
        self._orders = orders
        self._environment = environment
        self._lock = threading.Lock()
        self._loading = self._loaded = self._closed = False

    @classmethod
    def fork_here(cls, modules: Sequence[str]) -> ForkServer | None:
        """Forks the server from this process, which has one thread; returns None if that is impossible.

        In the processes that come from it the program of the order runs, and this call does not return.
        """
        if None in (sys.stdin, sys.stdout, sys.stderr) or not (can_fork_here() and has_one_thread()):
            return None
        environment = {**os.environ, **thread_environment(1)}
        parent = os.getpid()
        with contextlib.ExitStack() as opened:
            try:
                ours, theirs = map(opened.enter_context, socket.socketpair())
                pid = os.fork()
            except OSError:  # no more files or processes
                return None
            if not pid:
                ours.close()
                server.run(parent, theirs, modules, environment)
            opened.pop_all()
        theirs.close()
        return cls(ForkedProcess(pid), ours, environment)

    @classmethod
    def spawn(cls, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> ForkServer | None:
        """Executes the server, which ends with the calling thread; returns None if nothing can be forked.

        Args:
            modules: to be loaded.
            environment: all of it; None: this process's.
        """
        if not can_fork_here():
            return None
        ours, theirs = socket.socketpair()
        given = {**(os.environ if environment is None else environment), **thread_environment(1)}
        with theirs:
            process = subprocess.Popen(
                die_with_parent([sys.executable, "-P", "-m", server.__name__, *modules]),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=given,
            )
        started = cls(process, ours, given)
        started.load()
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server, and nothing that was forked from it. A start that waits for it in another thread ends."""
        self._end()
        if self._lock.acquire(blocking=False):
            self._orders.close()
            self._lock.release()

    def _end(self) -> None:
        self._closed = True
        self._process.kill()
        self._process.wait()

    def load(self) -> None:
        """Makes the server load its modules while this process continues, unless an order has done so already."""
        if not self._loading:
            self._loading = True
            # An order finds out that it is gone.
            with contextlib.suppress(OSError):
                self._orders.sendall(server.GO)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | IO[bytes],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        cwd: Path | str | None = None,
    ) -> ForkedProcess | None:
        """Starts a command in a session of its own; None if it is to be executed.

        It waits until the modules are loaded. The server is killed at its first timeout or error.

        Args:
            command: `PYTHON -P -m MODULE ARGUMENT...`; another one is executed.
            env: all of the environment.
            stdin, stdout, stderr: open files, or `subprocess.DEVNULL`.
            cwd: folder; None: this process's.
        """
        if not can_fork(command, env, self._environment) or has_drifted(self.pid):
            return None
        with self._lock:
            if self._closed:
                return None
            try:
                order = {"command": list(command), "environment": dict(env), **surroundings(cwd)}
                with open(os.devnull, "r+b", buffering=0) as nothing:
                    chosen = (nothing if file == subprocess.DEVNULL else file for file in (stdin, stdout, stderr))
                    return self._order(order, [file if isinstance(file, int) else file.fileno() for file in chosen])
            except (OSError, ValueError):
                self._end()
                return None
            finally:
                if self._closed:
                    self._orders.close()

    def _order(self, order: Mapping[str, Any], files: Sequence[int]) -> ForkedProcess:
        """Raises OSError or ValueError if nothing was forked, nor ever will be."""
        self.load()
        self._orders.settimeout(_ORDER_S)
        if not self._loaded:
            self._await_word(self._orders, _LOADED_S)
            if self._orders.recv(1) != server.READY:
                raise ConnectionError
        self._loaded = True
        ours, theirs = socket.socketpair()
        with ours, _adopting():
            ours.settimeout(_ORDER_S)
            with theirs:
                socket.send_fds(self._orders, [server.GO], [*files, theirs.fileno()])
            ours.sendall(json.dumps(order).encode() + b"\n")
            self._await_word(ours, _ORDER_S)
            with ours.makefile("rb") as answer:
                forked = ForkedProcess(int(answer.readline()))
            # It waits for this, and would end without it.
            ours.sendall(server.GO)
        return forked

    def _await_word(self, connection: socket.socket, within_s: float) -> None:
        """Waits until there is something to read; raises TimeoutError if that takes too long, or the server is stopped.

        Args:
            connection: to the server, or to what it forks.
            within_s: seconds to wait at most.
        """
        begun, reported = time.monotonic(), False
        while not ends_within(connection.fileno(), _LOOK_EVERY_S):
            waited_s = time.monotonic() - begun
            if is_stopped(self.pid) or waited_s > within_s:
                log.warning("the process that forks services is stopped or too slow: from now on they are executed")
                raise TimeoutError
            if waited_s > _SLOW_S and not reported:
                reported = True
                log.warning("still waiting for process %d, which loads what services share", self.pid)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of its orphaned grandchildren, for as long as the block runs.

    Those that are no server's, it reaps when they end, as no one here waits for them. It never reaps what was started
    during the block: that may be a child of the caller's own.
    """
    with _adoption:
        before = ctypes.c_int()
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        if before.value:
            yield
            return
        here = os.getpid()
        grandchildren = [process for process in descendants(here) if _parent(process) != here]
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
            for process in grandchildren:
                if _parent(process) == here:
                    _reap_when_ended(process.pid)


def _parent(process: psutil.Process) -> int | None:
    """None once it is gone."""
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return None


def _reap_when_ended(pid: int) -> None:
    with contextlib.suppress(OSError):
        threading.Thread(target=ForkedProcess(pid).wait, name=f"waits for process {pid}", daemon=True).start()


def _prctl(option: int, argument: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
