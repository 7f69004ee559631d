"""The `rollmesh` command as a process that is forked from one that has imported everything.

Each test process has one such server, from its first command on. A launcher that was forked here has its services
forked in turn. Where an environment differs in more than is known to be read late, the command is executed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest

from rollmesh.launcher.preloaded import PRELOADED_MODULES
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.fork_server.forked import ForkedProcess
from rollmesh.mesh.runtime.threads import thread_environment
from tests.repository import REPOSITORY

PYTHON = (sys.executable, "-P", "-m")
CLI = (*PYTHON, "rollmesh.cli")
# All that a server loads, step by step: tests/test_imports_at_start.py asks what each step adds.
STEPS = (
    ("rollmesh.cli.app", *(name for name in PRELOADED_MODULES if ".launcher." in name or ".cli." in name)),
    ("rollmesh.reward_service.server.service",),
    ("rollmesh.buffer.server.process",),
    ("torch", "tests.devices_watched"),
    tuple(name for name in PRELOADED_MODULES if ".generators." in name),
    (*(name for name in PRELOADED_MODULES if ".learner." in name), "tests.devices_unwatched"),
)
# The server ends with the thread that has started it: this one stays.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="starts the fork server")
# The threads of computing are each command's own.
_WAITING = {name: value for name, value in thread_environment(1).items() if not name.endswith("_NUM_THREADS")}


@cache
def environment() -> Mapping[str, str]:
    """The environment in which the server of this process has loaded its modules."""
    return for_commands(os.environ)


def server() -> ForkServer:
    """The server of this process; it ends with it. Threads that ask for it together get the same one."""
    return _STARTER.submit(_started).result()


@cache
def _started() -> ForkServer:
    started = ForkServer.spawn([name for step in STEPS for name in step], environment())
    assert started is not None
    return started


def take_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives this process an environment with which its children can be forked, when the test itself is running."""
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def lend_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a program of a user's, which a test runs in this process, have the server that is there."""
    take_environment(monkeypatch)
    monkeypatch.setattr(ForkServer, "spawn", lambda _modules: nullcontext(server()))


class RunningCommand:
    """A running command, as far as `subprocess.Popen` has the same; a context manager.

    Attributes:
        pid, returncode: as those of `Popen`.
        stdin, stdout, stderr: its pipes, where they were asked for.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        files: Mapping[str, int | IO[Any] | None],
        *,
        text: bool,
    ) -> None:
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        self.args = list(command)
        theirs, to_close = {"stdin": 0, "stdout": 1, "stderr": 2}, []
        for name, file in files.items():
            if file == subprocess.PIPE:
                read, write = os.pipe()
                ours, theirs[name] = (write, read) if name == "stdin" else (read, write)
                to_close.append(theirs[name])
                mode = "w" if name == "stdin" else "r"
                setattr(self, name, open(ours, mode) if text else open(ours, f"{mode}b", 0))  # noqa: SIM115
            elif file == subprocess.STDOUT:
                theirs[name] = theirs["stdout"]
            elif file is not None:
                theirs[name] = file if isinstance(file, int) else file.fileno()
        try:
            self._process = (
                server().start(command, env=env, cwd=cwd, **theirs)
                or _STARTER.submit(
                    subprocess.Popen, die_with_parent(command), env=env, cwd=cwd, start_new_session=True, **theirs
                ).result()
            )
        finally:
            for descriptor in to_close:
                os.close(descriptor)
        self.forked = isinstance(self._process, ForkedProcess)
        self.pid = self._process.pid
        self.poll, self.wait = self._process.poll, self._process.wait
        self.send_signal, self.terminate, self.kill = (
            self._process.send_signal,
            self._process.terminate,
            self._process.kill,
        )

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def __enter__(self) -> RunningCommand:
        return self

    def __exit__(self, *_error: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def popen(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
    module: str = "rollmesh.cli",
) -> RunningCommand:
    """Starts `rollmesh ARGUMENTS` in a session of its own, which dies with this process.

    Args:
        arguments: of the command.
        env: all of the environment; None: this process's.
        cwd: its folder.
        stdin, stdout, stderr, text: as those of `subprocess.Popen`.
        module: another one to run in place of the command.
    """
    files = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    whole = for_commands(os.environ if env is None else env)
    return RunningCommand([*PYTHON, module, *arguments], whole, cwd, files, text=text)


def run(arguments: Sequence[str], *, timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command run to its end, with its output as text; like `subprocess.run(..., capture_output=True)`.

    Args:
        arguments: of the command.
        timeout: seconds after which it is killed, and `subprocess.TimeoutExpired` is raised.
        options: of `popen`.
    """
    # Files, of which nothing has to be read while it runs.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = popen(arguments, stdout=out, stderr=err, **options)
        try:
            status = command.wait(timeout)
        except BaseException:
            command.kill()
            command.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command.args, status, out.read(), err.read())


def for_commands(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with what the server must have had when it was loaded, and without the name of a test."""
    whole = {**_WAITING, "PYTHONPATH": str(REPOSITORY), **environment}
    return {name: value for name, value in whole.items() if name != "PYTEST_CURRENT_TEST"}
