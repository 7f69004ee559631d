"""The product's commands, forked from a process that has imported what they need.

The imports take most of a start, and faults cost many starts. A forked process has its own session, environment and
output, as one that was executed. It ends with this server, and that with the process that started it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.threads import thread_environment
from tests.repository import REPOSITORY

CLI = ("-m", "rollmesh.cli")
_START_S = 200.0
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_IMPORTS = (
    "rollmesh.buffer.server.process",
    "rollmesh.cli.app",
    "rollmesh.generators.engines.hf.engine",
    "rollmesh.generators.service",
    "rollmesh.learner.engines.fsdp2.engine",
    "rollmesh.learner.role_service.service",
    "rollmesh.learner.service",
    "rollmesh.reward_service.server.service",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
)


class Forked:
    """A process that the server has forked, as far as `subprocess.Popen` would tell of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: Future[int] = Future()

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code; negative: the signal that ended it."""
        return self.code.result(timeout_s)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if not self.code.done():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


class ForkServer:
    """Client of such a process, which starts with the first command and ends with the thread that gave it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._server: subprocess.Popen[str] | None = None
        self._started: Future[Forked] = Future()
        self._alive: dict[int, Forked] = {}

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, namespace: str = "") -> Forked:
        """Starts `rollmesh` with arguments; for one thread.

        Args:
            environment: all of it.
            log: takes its output.
            namespace: name of the network namespace that it enters; empty: none.
        """
        if self._server is None:
            self._server = self._execute()
        assert self._server.stdin is not None
        self._started = Future()
        order = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "log": str(log),
            "namespace": namespace,
        }
        print(json.dumps(order), file=self._server.stdin, flush=True)
        return self._started.result(_START_S)

    def close(self) -> None:
        """Ends the server, and whatever it has forked."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def _execute(self) -> subprocess.Popen[str]:
        with self._log.open("w") as log:
            server = subprocess.Popen(
                die_with_parent([sys.executable, "-m", "tests.faults.fork_server"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **thread_environment(1), "PYTHONPATH": str(REPOSITORY)},
                text=True,
            )
        threading.Thread(target=self._listen, args=(server,), daemon=True).start()
        return server

    def _listen(self, server: subprocess.Popen[str]) -> None:
        assert server.stdout is not None
        for line in server.stdout:
            pid, code = json.loads(line)
            if code is None:
                self._alive[pid] = Forked(pid)
                self._started.set_result(self._alive[pid])
            else:
                self._alive.pop(pid).code.set_result(code)
        if not self._started.done():
            self._started.set_exception(AssertionError(f"the fork server ended:\n{self._log.read_text()[-3000:]}"))
        for forked in self._alive.values():
            forked.code.set_result(-signal.SIGKILL)


def _serve() -> None:
    """Forks a process for each order that is read, and answers `[pid, null]`, then `[pid, exit code]`; returns in each
    forked process."""
    for name in _IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    events = selectors.DefaultSelector()
    events.register(sys.stdin.fileno(), selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.data is not None:
                events.unregister(key.fd)
                os.close(key.fd)
                print(json.dumps((key.data, os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1]))), flush=True)
            elif line := sys.stdin.readline():  # the next order comes only once this one is answered
                parent, order = os.getpid(), json.loads(line)
                pid = os.fork()
                if not pid:
                    events.close()
                    _become(parent, **order)
                    return
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                print(json.dumps((pid, None)), flush=True)
            else:
                raise SystemExit


def _become(parent: int, arguments: list[str], environment: dict[str, str], log: str, namespace: str) -> None:
    """Makes this process as if it had been executed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGKILL)
    os.setsid()
    if namespace:
        _enter(namespace)
    for file, flags, targets in ((os.devnull, os.O_RDONLY, (0,)), (log, os.O_WRONLY | os.O_APPEND, (1, 2))):
        descriptor = os.open(file, flags)
        for target in targets:
            os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = ["rollmesh", *arguments]
    # Ranks are executed by it.
    sys.orig_argv = [sys.executable, *CLI, *arguments]


def _enter(namespace: str) -> None:
    """Enters a network namespace of `ip netns`."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


if __name__ == "__main__":
    _serve()
    from rollmesh.cli.app import main

    main()
