"""Processes of tests, forked from one that has imported what they need, which takes most of a start.

It starts with the first of them, and ends with this process. A forked process has its own session, environment, folder,
input and output, as one that was executed.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import multiprocessing
import os
import random
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from tests.repository import REPOSITORY

_PR_SET_PDEATHSIG = 1
_IMPORTS = [
    "rollmesh.cli.app",
    "rollmesh.generators.engines.hf.engine",
    "rollmesh.generators.service",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.generators.pacing",
    "tests.generators.weights.receiving",
    "tests.generators.weights.transports.cases",
    "tests.generators.weights.transports.world",
]


class Forked:
    """Such a process, as far as `asyncio.subprocess.Process` would tell of it.

    Attributes:
        stdin, stdout: its pipes.
    """

    def __init__(self, process: ForkServerProcess, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self._process = process
        self.stdin, self.stdout = stdin, stdout

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative: the signal that ended it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Waits for its end; the exit code."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        self.stdin.close()
        assert self.returncode is not None
        return self.returncode


async def fork(
    module: str,
    *arguments: str,
    first: str = "",
    folder: Path = REPOSITORY,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Forked:
    """Runs a module as `python -m` does.

    Args:
        module: its name.
        arguments: of its command line.
        first: statements that are executed before.
        folder: in which it works.
        environment: variables in addition to those of this process.
        log: takes its output, instead of the pipe.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    read, stdout = os.pipe()
    stdin, write = os.pipe()
    process = context.Process(
        target=_run,
        args=(_Pipes(stdin, stdout), log, folder, {**os.environ, **(environment or {})}, first, module, arguments),
    )
    # Imports may be under way when it is asked for the first one.
    await asyncio.to_thread(process.start)
    for end in (stdin, stdout):
        os.close(end)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(write, "wb", 0))
    return Forked(process, asyncio.StreamWriter(transport, protocol, None, loop), reader)


class _Pipes:
    """Ends of pipes that go to another process."""

    def __init__(self, *ends: int) -> None:
        self.ends = ends

    def __getstate__(self) -> list[Any]:
        return [DupFd(end) for end in self.ends]

    def __setstate__(self, ends: list[Any]) -> None:
        self.ends = tuple(end.detach() for end in ends)


def _run(
    pipes: _Pipes,
    log: Path | None,
    folder: Path,
    environment: dict[str, str],
    first: str,
    module: str,
    arguments: tuple[str, ...],
) -> None:
    """Makes this process as if it had been executed, and runs the module."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.setsid()
    for target, end in enumerate(pipes.ends):
        os.dup2(end, target)
        os.close(end)
    if log is not None:
        for target, file in enumerate((os.devnull, log, log)):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, target)
            os.close(descriptor)
    # Python's own helper has closed its input in the fork.
    sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    random.seed()
    sys.argv = [module, *arguments]
    try:
        exec(first, {})  # a test's own
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
