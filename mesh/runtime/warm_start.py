"""Processes that begin with their imports done: forked from a server that has loaded them, not executed.

Invariants:
- a forked process is a child of the process that ordered it, and dies with its main thread. The server's end touches
  none, and a server that is gone or silent means that its client executes commands itself;
- it is as one that was executed: name, arguments, environment, folder, session, signals, limits and files are those of
  the order. Its random numbers are its own. Only the seed of hashes is the server's;
- the server has one thread and no device, runs none of its modules' services, and holds no file of its client.

The server forks twice, and its client adopts the grandchild: it is a subreaper for that moment. So a process that must
not adopt orphans, as a user's own, adopts none. Linux alone has this.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import setproctitle

from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.threads import thread_environment

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
# Imports from a slow disk take their time; an order is a matter of milliseconds.
_LOADED_S, _ORDER_S = 180.0, 30.0
_READY, _GO = b"r", b"g"
# Nothing reads these when it is loaded. A difference in any other variable needs a new interpreter.
_READ_LATE = frozenset(
    {
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "PATH"),
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"),
        *("COLUMNS", "LINES", "TERM", "PWD", "OLDPWD", "SHLVL", "_"),
    }
)
_READ_LATE_PREFIXES = ("ROLLMESH_", "NCCL_", "SLURM_")


class Forked:
    """A child process that was forked, as far as `subprocess.Popen` has the same.

    Attributes:
        pid: its process id.
        returncode: exit status, or the negative number of the signal that has ended it; None before that is known.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._file = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The return code, where it has ended."""
        with self._lock:
            if self.returncode is None and select.select([self._file], [], [], 0)[0]:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                os.close(self._file)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the return code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self.returncode is None:
            # Another thread may reap it meanwhile, and close its file.
            with self._lock:
                watched = os.dup(self._file) if self.returncode is None else os.open(os.devnull, os.O_RDONLY)
            try:
                select.select([watched], [], [], timeout)
            finally:
                os.close(watched)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal; one that has ended stays as it is."""
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._file, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmServer:
    """A server that this process owns; it loads its modules meanwhile. A context manager.

    Args:
        process: of the server.
        orders: the connection to it.
        environment: in which it loads its modules.
    """

    def __init__(
        self, process: Forked | subprocess.Popen[bytes], orders: socket.socket, environment: Mapping[str, str]
    ) -> None:
        self._process = process
        self._orders = orders
        self._environment = environment
        self._lock = threading.Lock()
        self._loaded = self._closed = False

    @classmethod
    def fork(cls, modules: Sequence[str]) -> WarmServer | None:
        """Forks the server from this process, which has one thread; returns None where that is impossible.

        In the processes that come from it the program of the order runs, and this call does not return.
        """
        if not _is_plain():
            return None
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **thread_environment(1)}
        parent, pid = os.getpid(), os.fork()
        if not pid:
            ours.close()
            _run_server(parent, theirs, modules, environment)
        theirs.close()
        return cls(Forked(pid), ours, environment)

    @classmethod
    def execute(cls, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> WarmServer | None:
        """Executes the server, which ends with the calling thread; returns None where nothing can be forked.

        Args:
            modules: to be loaded.
            environment: all of it; None: this process's.
        """
        if sys.platform != "linux":
            return None
        ours, theirs = socket.socketpair()
        given = {**(os.environ if environment is None else environment), **thread_environment(1)}
        with theirs:
            process = subprocess.Popen(
                die_with_parent([sys.executable, "-m", __spec__.name, *modules]),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=given,
            )
        return cls(process, ours, given)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> WarmServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server; processes that were forked from it continue."""
        self._closed = True
        self._process.kill()
        self._process.wait()
        self._orders.close()

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | IO[bytes],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        cwd: Path | str | None = None,
    ) -> Forked | None:
        """Starts a command in a session of its own; None where it is to be executed.

        It waits until the modules are loaded. The first silence or error of the server is its end.

        Args:
            command: `PYTHON -m MODULE ARGUMENT...`.
            env: all of the environment.
            stdin, stdout, stderr: open files, or `subprocess.DEVNULL`.
            cwd: folder; None: this process's.
        """
        if not can_fork(command, env, self._environment):
            return None
        with self._lock:
            if self._closed:
                return None
            try:
                order = {"command": list(command), "environment": dict(env), **_surroundings(cwd)}
                with open(os.devnull, "r+b", buffering=0) as nothing:
                    chosen = (nothing if file == subprocess.DEVNULL else file for file in (stdin, stdout, stderr))
                    return self._order(order, [file if isinstance(file, int) else file.fileno() for file in chosen])
            except (OSError, ValueError):
                self.close()
                return None

    def _order(self, order: Mapping[str, Any], files: Sequence[int]) -> Forked:
        """Raises OSError or ValueError where nothing was forked, nor ever will be."""
        self._orders.settimeout(_LOADED_S)
        if not self._loaded and self._orders.recv(1) != _READY:
            raise ConnectionError
        self._loaded = True
        self._orders.settimeout(_ORDER_S)
        ours, theirs = socket.socketpair()
        with ours, _adopting():
            ours.settimeout(_ORDER_S)
            with theirs:
                socket.send_fds(self._orders, [_GO], [*files, theirs.fileno()])
            ours.sendall(json.dumps(order).encode() + b"\n")
            with ours.makefile("rb") as answer:
                forked = Forked(int(answer.readline()))
            # It waits for this, and would end without it.
            ours.sendall(_GO)
        return forked


def can_fork(command: Sequence[str], environment: Mapping[str, str], loaded: Mapping[str, str]) -> bool:
    """True where a process that was loaded in one environment can become a command in another.

    Args:
        command: argument list.
        environment: of the command.
        loaded: that of the process.
    """
    if tuple(command[:2]) != (sys.executable, "-m"):
        return False
    differing = {name for name, _ in environment.items() ^ loaded.items()}
    return all(name in _READ_LATE or name.startswith(_READ_LATE_PREFIXES) for name in differing)


def has_one_thread() -> bool:
    """True where a fork of this process would lose no thread; False where that is unknown."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return False


def become_another() -> None:
    """Forgets in a forked process the random state that it shares with its parent."""
    # The standard library's generators do so themselves; torch's seed is the same in every new process.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)


def end_with(parent: int) -> None:
    """Ends this process as soon as the main thread of its parent has ended."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _is_plain() -> bool:
    """True where this process is as the `rollmesh` command begins, without options of the interpreter."""
    program, *rest = sys.orig_argv[1:] or [""]
    ours = Path(program).name == "rollmesh" or (program == "-m" and rest[:1] in (["rollmesh"], ["rollmesh.cli"]))
    whole = None not in (sys.stdin, sys.stdout, sys.stderr)
    return sys.platform == "linux" and ours and whole and has_one_thread()


def _surroundings(cwd: Path | str | None) -> dict[str, Any]:
    """All that a child inherits of this process beside its environment and its files."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    ignored = int(status["SigIgn"], 16)
    return {
        "parent": os.getpid(),
        "folder": str(cwd) if cwd is not None else os.getcwd(),
        "umask": int(status["Umask"], 8),
        "ignored": [number for number in signal.valid_signals() if ignored >> (number - 1) & 1],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "limits": {kind: resource.getrlimit(kind) for kind in _limits()},
    }


def _limits() -> set[int]:
    return {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of its orphaned grandchildren, for as long as the block runs."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _prctl(option: int, argument: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


# --------------------------------------------------------------------------------------------------- in the server


def _run_server(parent: int, orders: socket.socket, modules: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Serves in a process that was forked for this; in those that it forks, the program runs."""
    end_with(parent)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    kept = orders.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.update(environment)
    _become(*_serve(orders, modules))


def _serve(orders: socket.socket, modules: Sequence[str]) -> tuple[dict[str, Any], list[int], socket.socket]:
    """Forks for each order, until its client is gone; returns in the forked processes: the order, and their files."""
    setproctitle.setproctitle("rollmesh: warm starts")
    for name in modules:
        # Whatever a module raises, the service that needs it will say so in its log.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    ctypes.CDLL(None).fflush(None)
    gc.collect()
    gc.freeze()
    orders.sendall(_READY)
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
            while os.getppid() == between:
                time.sleep(0.001)
            return order, files, connection
        for file in files:
            os.close(file)
        if child > 0:
            os.waitpid(child, 0)


def _become(order: dict[str, Any], files: Sequence[int], connection: socket.socket) -> NoReturn:
    """Makes this process what it would be if it had been executed, and runs its program."""
    if order is None:
        os._exit(1)
    end_with(order["parent"])
    os.setsid()
    with connection:
        connection.sendall(b"%d\n" % os.getpid())
        if connection.recv(1) != _GO:
            os._exit(1)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.chdir(order["folder"])
    os.umask(order["umask"])
    for kind, limit in order["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(int(kind), tuple(limit))
    os.environ.clear()
    os.environ.update(order["environment"])
    _reset_signals(order["ignored"], order["blocked"])
    become_another()
    _run_program(order["command"])


def _reset_signals(ignored: Sequence[int], blocked: Sequence[int]) -> None:
    """Gives signals the handlers with which an interpreter begins."""
    signal.set_wakeup_fd(-1)
    by_python = (signal.SIGPIPE, signal.SIGXFSZ)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler: Any = signal.SIG_IGN if number in ignored or number in by_python else signal.SIG_DFL
        if number == signal.SIGINT and handler is signal.SIG_DFL:
            handler = signal.default_int_handler
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _run_program(command: list[str]) -> NoReturn:
    """Runs `PYTHON -m MODULE ARGUMENT...` to its end."""
    setproctitle.setproctitle(" ".join(command))
    setproctitle.setthreadtitle(Path(command[0]).name)
    _, _, module, *arguments = command
    sys.orig_argv, sys.argv = command, ["-m", *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    importlib.invalidate_caches()
    code: object = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001  # as the interpreter does it
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _end(code: object) -> NoReturn:
    """Ends as the interpreter does, but does not destroy its modules, which takes a third of a second."""
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Closed, or without a reader.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code == -signal.SIGINT:
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
