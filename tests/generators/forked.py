"""Processes of these tests, forked, as far as `asyncio.subprocess` would have them."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from tests import fork_server


class ForkedProgram:
    """A process with pipes."""

    def __init__(self, command: fork_server.RunningCommand) -> None:
        self._command = command
        self.pid, self.send_signal, self.kill = command.pid, command.send_signal, command.kill

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._command.poll()

    async def readline(self) -> bytes:
        """The next line of its output."""
        assert self._command.stdout is not None
        line: bytes = await asyncio.to_thread(self._command.stdout.readline)
        return line

    async def write(self, text: str) -> None:
        """Writes a line of its input."""
        assert self._command.stdin is not None
        await asyncio.to_thread(self._command.stdin.write, f"{text}\n".encode())

    async def wait(self) -> int:
        """Waits for its end; the exit code."""
        return await asyncio.to_thread(self._command.wait)

    async def end(self) -> None:
        """Kills it, where it runs yet, and takes its pipes away."""
        self.kill()
        await asyncio.to_thread(self._command.__exit__)


def fork(module: str, *arguments: str, log: Path | None = None) -> ForkedProgram:
    """Runs a module as `python -m` does.

    Args:
        module: its name.
        arguments: of its command line.
        log: takes its output, instead of a pipe.
    """
    if log is None:
        command = fork_server.popen(arguments, module=module, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return ForkedProgram(command)
    with log.open("ab") as file:
        return ForkedProgram(fork_server.popen(arguments, module=module, stdout=file, stderr=file))
