"""One execution of a program of the host, bounded in time and output, on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.reward_service.sandbox.interface import Cause
from rollmesh.reward_service.sandbox.zygote import ORDINARY_USER

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Executed:
    """An end.

    Attributes:
        cause: "wall" or "output" if it was killed for that; else empty.
        exit_code: exit code, or a signal's negative number.
        stdout, stderr: at most the bytes that were allowed, each.
        cpu_s: seconds of CPU time, of all that it has waited for.
        peak: largest resident memory of one process, bytes.
    """

    cause: Cause
    exit_code: int
    stdout: bytes
    stderr: bytes
    cpu_s: float
    peak: int


async def execute(
    argv: Sequence[str], stdin: bytes, most: int, wall_s: float, *, pass_fds: Sequence[int] = ()
) -> Executed:
    """Runs a program; as an ordinary user, if this process is root's.

    Args:
        argv: the program's path, and its arguments.
        stdin: its standard input.
        most: bytes of output.
        wall_s: seconds.
        pass_fds: descriptors that it gets.

    Raises:
        OSError: it cannot be run.
    """
    process = _start(argv, stdin, pass_fds)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        watch = _Watch(process.pid, process.stdout.fileno(), process.stderr.fileno(), most)
        try:
            await watch.until_end(wall_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status, usage = await asyncio.shield(asyncio.to_thread(_wait, process.pid))
            process.returncode = os.waitstatus_to_exitcode(status)
            stdout, stderr = watch.outputs(process.stdout.fileno(), process.stderr.fileno())
            watch.close()
    cpu_s = usage.ru_utime + usage.ru_stime
    return Executed(watch.cause, process.returncode, stdout, stderr, cpu_s, usage.ru_maxrss << 10)


def _start(argv: Sequence[str], stdin: bytes, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    given = os.memfd_create("stdin")
    try:
        with open(given, "wb", closefd=False) as file:
            file.write(stdin)
        os.lseek(given, 0, os.SEEK_SET)
        root = os.geteuid() == 0
        return subprocess.Popen(
            argv,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
            cwd="/",
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            user=ORDINARY_USER if root else None,
            group=ORDINARY_USER if root else None,
            extra_groups=[] if root else None,
        )
    finally:
        os.close(given)


def _wait(pid: int) -> tuple[int, resource.struct_rusage]:
    _, status, usage = os.wait4(pid, 0)
    return status, usage


class _Watch:
    """Reads outputs until a process ends."""

    def __init__(self, pid: int, stdout: int, stderr: int, most: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._most = most
        self._ended = asyncio.Event()
        self.cause: Cause = ""
        self._process = os.pidfd_open(pid)
        self._outputs = {stdout: bytearray(), stderr: bytearray()}
        for descriptor in self._outputs:
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._read, descriptor)
        self._loop.add_reader(self._process, self._ended.set)

    async def until_end(self, wall_s: float) -> None:
        """Waits until it has ended, or has to be killed for `cause`."""
        try:
            async with asyncio.timeout(wall_s):
                await self._ended.wait()
        except TimeoutError:
            self.cause = "wall"

    def close(self) -> None:
        """Stops to read."""
        for descriptor in (*self._outputs, self._process):
            self._loop.remove_reader(descriptor)
        os.close(self._process)

    def outputs(self, stdout: int, stderr: int) -> tuple[bytes, bytes]:
        """All that was written, once no process writes."""
        for descriptor, output in self._outputs.items():
            while len(output) <= self._most and self._read(descriptor):
                pass
        return bytes(self._outputs[stdout][: self._most]), bytes(self._outputs[stderr][: self._most])

    def _read(self, descriptor: int) -> bool:
        """Reads once; False if there is nothing more."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        self._outputs[descriptor] += data
        if not data:
            self._loop.remove_reader(descriptor)
        if sum(map(len, self._outputs.values())) > self._most:
            self.cause = self.cause or "output"
            self._ended.set()
        return bool(data)
