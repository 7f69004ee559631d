"""The server from which processes are forked, and what makes each as if it had been executed."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from rollmesh.mesh.runtime.die_with_parent import end_with
from rollmesh.mesh.runtime.fork_server.files import become_forked, flush_files
from rollmesh.mesh.runtime.fork_server.forked import ends_within, reseed

READY, GO = b"r", b"g"
_ADOPTED_S = 30.0


def run(parent: int, orders: socket.socket, modules: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Serves in a process that was forked for this; in those that it forks, the program runs."""
    try:
        end_with(parent)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        kept = orders.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        # From now on it knows where the kernel has put the name: next to the environment with which this began.
        setproctitle.getproctitle()
        os.environ.update(environment)
        if not sys.flags.safe_path:
            # The folder of a script, or the working folder: with `-P` a service has neither.
            del sys.path[0]
        _become(*_serve(orders, modules))
    except BaseException as error:  # noqa: BLE001  # below is the program of the process that forked this one
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


def _serve(orders: socket.socket, modules: Sequence[str]) -> tuple[dict[str, Any], list[int], socket.socket]:
    """Forks for each order, until its client is gone; returns in the forked processes: the order, and their files."""
    setproctitle.setproctitle("rollmesh: fork server")
    # A client that ignores it hands that down; the ends of children would be no one's.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not orders.recv(1):
        os._exit(0)
    for name in modules:
        # Whatever a module raises, the service that needs it will say so in its log.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    ctypes.CDLL(None).fflush(None)
    gc.collect()
    gc.freeze()
    orders.sendall(READY)
    while True:
        _, files, _, _ = socket.recv_fds(orders, 1, 4)
        if not files:
            os._exit(0)
        try:
            child = os.fork()
        except OSError:  # the client sees that the files are closed
            child = -1
        if not child:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            orders.close()
            connection = socket.socket(fileno=files.pop())
            with connection.makefile("rb") as line:
                order = json.loads(line.readline() or "null")
            _wait_for_end(between)
            return order, files, connection
        for file in files:
            os.close(file)
        if child > 0:
            os.waitpid(child, 0)


def _wait_for_end(pid: int) -> None:
    """Waits until the process between is gone, and its child adopted; `end_with` ends a child that never is."""
    with contextlib.suppress(ProcessLookupError):
        file = os.pidfd_open(pid)
        ends_within(file, _ADOPTED_S)
        os.close(file)


def _become(order: dict[str, Any], files: Sequence[int], connection: socket.socket) -> NoReturn:
    """Makes this process what it would be if it had been executed, and runs its program."""
    if order is None:
        os._exit(1)
    end_with(order["parent"])
    os.setsid()
    with connection:
        connection.sendall(b"%d\n" % os.getpid())
        if connection.recv(1) != GO:
            os._exit(1)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
    os.chdir(order["folder"])
    os.umask(order["umask"])
    for kind, limit in order["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(int(kind), tuple(limit))
    os.environ.clear()
    os.environ.update(order["environment"])
    _reset_signals(order["ignored"], order["blocked"])
    reseed()
    become_forked()
    _run_program(order["command"])


def _reset_signals(ignored: Sequence[int], blocked: Sequence[int]) -> None:
    """Gives signals the handlers with which an interpreter begins."""
    signal.set_wakeup_fd(-1)
    by_python = (signal.SIGPIPE, signal.SIGXFSZ)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler: Any = signal.SIG_IGN if number in ignored or number in by_python else signal.SIG_DFL
        if number == signal.SIGINT and handler is signal.SIG_DFL:
            handler = signal.default_int_handler
        # None: a handler in C, as that of `faulthandler`.
        if signal.getsignal(number) is not None:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _run_program(command: list[str]) -> NoReturn:
    """Runs `PYTHON -P -m MODULE ARGUMENT...` to its end."""
    setproctitle.setproctitle(" ".join(command))
    setproctitle.setthreadtitle(Path(command[0]).name)
    _, _, _, module, *arguments = command
    sys.orig_argv, sys.argv = command, ["-m", *arguments]
    importlib.invalidate_caches()
    # The server may have loaded it, and runs it once more.
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)
    code: object = None
    interrupted = False
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001  # as the interpreter does it
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    _end(code, interrupted=interrupted)


def _end(code: object, *, interrupted: bool) -> NoReturn:
    """Ends as the interpreter does, but does not destroy its modules, which takes a third of a second."""
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    # Private to CPython, hence not by its name: only this waits for threads and runs what they have registered.
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    flush_files()
    for stream in (sys.stdout, sys.stderr):
        # Closed, or without a reader.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    _modules, _orders = sys.argv[1:], socket.socket(fileno=os.dup(0))
    _nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(_nothing, 0)
    os.close(_nothing)
    os.setsid()
    _become(*_serve(_orders, _modules))
