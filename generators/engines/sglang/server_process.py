"""A server that the generator starts and owns: its processes, its log, its end.

Invariants: it ends with this object, and with this process however that ends (see `server_watchdog`). A wait for it
ends with its death, and returns the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.process_log import tail
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.liveness.process_ends import signal_name
from rollmesh.mesh.liveness.process_state import read_process_trees
from rollmesh.mesh.runtime.child_processes import Child, start_process

log = logging.getLogger(__name__)

_WATCHDOG = Path(__file__).with_name("server_watchdog.py")
_TAIL_BYTES = 4000
_STOP_S = 60.0
# Before the name of the signal, in the cause of its end.
KILLED_BY = "killed by "
# Below those that Linux gives out (net.ipv4.ip_local_port_range).
_PORTS = range(20_000, 32_000)


class ServerProcess:
    """The processes of one server, in one event loop.

    Attributes:
        scratch: folder for its temporary files; removed with it.
        log_file: the output of it and its children.
    """

    def __init__(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="rollmesh-sglang-"))
        self.log_file = self.scratch / "server.log"
        self._watchdog: Child | None = None
        self._watch: asyncio.Task[str] | None = None
        self._stopping = False

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it; it is not ready yet.

        Args:
            command: interpreter first.
            environment: variables in addition to those of this process.

        Raises:
            EngineError: there is no such interpreter.
        """
        # Its sockets and temporary files are made where they are removed with it.
        temporary = self.scratch / "tmp"
        temporary.mkdir()
        with self.log_file.open("wb") as output:
            try:
                self._watchdog = await start_process(
                    [command[0], str(_WATCHDOG), str(self.scratch), *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, **environment, "TMPDIR": str(temporary)},
                )
            except OSError as error:
                raise EngineError(
                    f"the interpreter of the SGLang server, {command[0]}, cannot be started: {error}",
                    hint="rollout.sglang.python names the interpreter of an environment with sglang (make sglang)",
                ) from error
        self._watch = asyncio.create_task(self._until_dead())

    async def until_dead(self) -> str:
        """Waits for its end; gives the cause, with the end of its log."""
        assert self._watch is not None, "start() comes first"
        return await asyncio.shield(self._watch)

    def process_state(self) -> ProcessState | None:
        """Reads the state of its processes; None before there are any."""
        return read_process_trees([self._watchdog.pid]) if self._watchdog is not None else None

    def listens_at(self, port: int) -> bool:
        """True where one of its processes listens at a TCP port; reads the open files of each of them."""
        assert self._watchdog is not None, "start() comes first"
        with contextlib.suppress(psutil.NoSuchProcess):
            watchdog = psutil.Process(self._watchdog.pid)
            return any(_listens(process, port) for process in watchdog.children(recursive=True))
        return False

    def tail(self) -> str:
        """The end of its log, without the colours."""
        return tail(self.log_file, _TAIL_BYTES)

    async def stop(self) -> None:
        """Kills it with all its children. May be called twice."""
        self._stopping = True
        if self._watchdog is not None:
            if self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
            try:
                await asyncio.wait_for(self._watchdog.wait(), _STOP_S)
            except TimeoutError:
                log.warning("the SGLang server does not end; killing its watchdog")
                self._watchdog.kill()
                await self._watchdog.wait()
        if self._watch is not None:
            await asyncio.wait({self._watch})
        shutil.rmtree(self.scratch, ignore_errors=True)

    async def _until_dead(self) -> str:
        assert self._watchdog is not None
        assert self._watchdog.stdout is not None
        report = (await self._watchdog.stdout.readline()).decode().strip()
        if self._stopping:
            return "the SGLang server was stopped"
        if report:
            code = int(report.removeprefix("exit "))
            cause = f"{KILLED_BY}{signal_name(-code)}" if code < 0 else f"exit code {code}"
        else:
            # Its output is closed by its end alone.
            cause = f"its watchdog has ended, with {await self._watchdog.wait()}"
        tail = self.tail().strip()
        return f"the SGLang server has died ({cause})" + (f"; the end of its log:\n{tail}" if tail else "")


class StartProgress:
    """Logs the progress of a long start every few seconds, with the last line of the server's log."""

    _EVERY_S = 15.0

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self._begin = self._logged_at = time.monotonic()

    def log_if_due(self) -> None:
        """Logs where the last message is old enough; may be called often."""
        now = time.monotonic()
        if now - self._logged_at >= self._EVERY_S:
            self._logged_at = now
            last = self._process.tail().strip().rpartition("\n")[2][:200]
            log.info("the SGLang server has been starting for %.0f s: %s", now - self._begin, last)


def _listens(process: psutil.Process, port: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        connections = process.net_connections("tcp")
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)
    return False


def free_port() -> int:
    """A loopback port that is free now, outside of the range from which the kernel gives out ports.

    The server binds it many seconds later, and another process may be faster (`ServerProcess.listens_at`).

    Raises:
        EngineError: none is.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free")
