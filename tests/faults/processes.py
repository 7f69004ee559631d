"""Processes that are started again when they end, as docker or an operator would: the same command, after a pause.

Invariants: a service has at most one current process, and one that was current is never forgotten. Every end is
recorded with its exit code. Nothing that was started here outlives `Supervisor.close`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from tests import fork_server
from tests.faults.connections import holder_of, socket_inode
from tests.faults.namespace import arguments_in

# Pauses before a restart: the first, and the longest of a service that keeps on ending at once.
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0
# A process that lived this long ends a series of quick ends.
_SETTLED_S = 20.0
_POLL_S = 0.05
_KILLED_S = 120.0


class FaultError(AssertionError):
    """An event that the harness waited for did not happen."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start.

    Attributes:
        command: argument list; of `rollmesh` where it is forked.
        environment: beyond this process's own.
        ready_file: written by the service once it answers; none: ready when it runs.
        forked: from this process's fork server.
        namespace: of a forked process, the network namespace that it enters; empty: none.
        clock_s: seconds by which the clock of its Python code is ahead there.
    """

    command: list[str]
    environment: Mapping[str, str]
    ready_file: Path | None = None
    forked: bool = False
    namespace: str = ""
    clock_s: int = 0


@dataclass(slots=True, eq=False)
class Process:
    """One start of a service.

    Attributes:
        service, index: name, and how many were started before.
        popen: the process.
        launch: as started.
        log: its output.
        code: exit code; None while it runs.
        wanted: the harness ended it, or let it go.
    """

    service: str
    index: int
    popen: subprocess.Popen[bytes] | fork_server.RunningCommand
    launch: Launch
    log: Path
    began: float = field(default_factory=time.monotonic)
    code: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    wanted: bool = False

    @property
    def name(self) -> str:
        return f"{self.service}-{self.index}"

    def tree(self) -> list[psutil.Process]:
        """The process and everything below it, parents first."""
        try:
            root = psutil.Process(self.popen.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        """The ranks that it has started; empty where it is the only one."""
        return [process for process in self.tree()[1:] if "rollmesh.cli" in _command(process)]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the whole tree."""
        for process in self.tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@dataclass(slots=True)
class _Service:
    name: str
    launch: Callable[[int], Launch]
    current: Process | None = None
    started: int = 0
    failure: Exception | None = None
    quick_ends: int = 0
    retired: bool = False


class Supervisor:
    """Starts services and starts them again.

    Args:
        folder: for `logs/`.

    Attributes:
        processes: all that were ever started, in order.
    """

    def __init__(self, folder: Path) -> None:
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._services: dict[str, _Service] = {}
        self._lock = threading.RLock()
        self._closing = threading.Event()
        # Children die with the thread that started them (the kernel's idea of a parent): this one stays.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="starter")
        self.processes: list[Process] = []

    def add(self, name: str, launch: Callable[[int], Launch]) -> Process:
        """Starts a service for good; `launch` is asked before each start with its number."""
        service = _Service(name, launch)
        self._services[name] = service
        return self._start(service)

    def current(self, name: str) -> Process | None:
        """The process of a service, if it runs."""
        process = self._services[name].current
        return process if process is not None and not process.ended.is_set() else None

    def kill9(self, name: str) -> None:
        """Kills the present process of a service with all that it started; returns when it is dead."""
        process = self.current(name)
        if process is not None:
            process.wanted = True
            process.signal(signal.SIGKILL)
            process.ended.wait(_KILLED_S)

    def owner(self, port: int, to: int) -> str:
        """Name of the process here that has a connection between two ports of 127.0.0.1; '' where there is none.

        A client that has closed its end meanwhile is not searched for. While one is, on a busy machine, others give up.
        """
        inode = socket_inode(port, to)
        if inode is None:
            return ""
        alive = [process for process in reversed(self.processes) if not process.ended.is_set()]
        names = {os.getpid(): "", **{process.popen.pid: process.name for process in alive}}
        pid = holder_of(inode, names)
        if pid is None:
            # Ranks are children of the process that was started.
            names = {child.pid: process.name for process in alive for child in process.tree()[1:]}
            pid = holder_of(inode, names)
        return "" if pid is None else names[pid]

    def succeed(self, name: str) -> tuple[Process, Process]:
        """Lets the present process continue by itself and starts another; gives both, the old one first."""
        service = self._services[name]
        with self._lock:
            old = service.current
            assert old is not None, name
            old.wanted = True
            return old, self._start(service)

    def retire(self, name: str, deadline_s: float) -> Process | None:
        """Ends a service in order (SIGTERM) and does not start it again.

        Raises:
            FaultError: it did not end in time.
        """
        service = self._services[name]
        with self._lock:
            service.retired = True
            process = self.current(name)
        if process is not None:
            process.wanted = True
            process.popen.terminate()
            if not process.ended.wait(deadline_s):
                raise FaultError(f"{process.name} did not end within {deadline_s} s of SIGTERM:\n{process.tail()}")
        return process

    def wait_ready(self, name: str, deadline_s: float) -> float:
        """Waits until the present process of a service answers; the time (monotonic) at which it was seen to.

        Raises:
            FaultError: the deadline passed, or it could not be started again.
        """
        until = time.monotonic() + deadline_s
        while True:
            if failure := self._services[name].failure:
                raise FaultError(f"{name} could not be started again") from failure
            process = self.current(name)
            ready = process.launch.ready_file if process is not None else None
            if process is not None and (ready is None or ready.exists()):
                return time.monotonic()
            if time.monotonic() > until:
                last = [p for p in self.processes if p.service == name][-1]
                raise FaultError(
                    f"{name} was not ready within {deadline_s} s (last start: {last.name}):\n{last.tail()}"
                )
            # Files have no event that needs no further package.
            self._closing.wait(_POLL_S)

    def address(self, name: str) -> str:
        """Where the present process of a service says it answers."""
        process = self.current(name)
        assert process is not None, name
        assert process.launch.ready_file is not None, name
        return str(json.loads(process.launch.ready_file.read_text())["address"])

    def close(self) -> None:
        """Kills what is left."""
        self._closing.set()
        for process in self.processes:
            if not process.ended.is_set():
                process.wanted = True
                process.signal(signal.SIGKILL)
                process.popen.kill()
        for process in self.processes:
            process.ended.wait(_KILLED_S)
        self._starter.shutdown()

    def _start(self, service: _Service) -> Process:
        with self._lock:
            index, service.started = service.started, service.started + 1
            launch = service.launch(index)
            log = self._logs / f"{service.name}-{index}.log"
            popen = self._starter.submit(_forked if launch.forked else _executed, launch, log).result()
            process = service.current = Process(service.name, index, popen, launch, log)
            self.processes.append(process)
        threading.Thread(target=self._watch, args=(service, process), daemon=True).start()
        return process

    def _watch(self, service: _Service, process: Process) -> None:
        code = process.popen.wait()
        process.code = code
        process.ended.set()
        quick = time.monotonic() - process.began < _SETTLED_S and not process.wanted
        service.quick_ends = service.quick_ends + 1 if quick else 0
        self._closing.wait(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**service.quick_ends))
        with self._lock:
            if service.current is process and not service.retired and not self._closing.is_set():
                try:
                    self._start(service)
                except (OSError, AssertionError) as error:  # told to the test, which waits in another thread
                    service.failure = error


def _forked(launch: Launch, log: Path) -> fork_server.RunningCommand:
    place = arguments_in(launch.namespace, launch.clock_s, launch.command)
    with log.open("wb") as output:
        return fork_server.popen(stdout=output, stderr=output, env={**os.environ, **launch.environment}, **place)


def _executed(launch: Launch, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            die_with_parent(launch.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **launch.environment},
            start_new_session=True,
        )
