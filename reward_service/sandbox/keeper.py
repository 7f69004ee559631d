"""The keeper: reads one job, runs its program once for each input, watches it to its end, answers, and ends.

Invariants
  * A program over its time or output is killed with all that it has started, and the answer leaves after that.
  * Each run is a process of its own, forked from this one, which executes nothing of the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import time
from mmap import mmap
from typing import Any

from rollmesh.reward_service.sandbox import linux, messages, program
from rollmesh.reward_service.sandbox.folder import JobFolder
from rollmesh.reward_service.sandbox.program import CompiledCode, Confinement

_READ_BYTES = 1 << 16
# Seconds for the pipes of killed processes to close.
_CLOSE_S = 1.0


def keep(connection: socket.socket, means: Confinement) -> None:
    """Runs the job that is waiting in `connection` for each input that follows, and answers there."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    received = messages.receive(connection)
    if received is None:
        return
    job, contents = received
    limits = job["limits"]
    if limits["processes"] > 1:  # its orphans are to be reaped before the next run
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    files = dict(zip(job["files"], contents, strict=True))
    folder = JobFolder(means.folder, files, limits["disk"] if means.rung > 2 else 0)
    compiled = CompiledCode(wanted=job["several"] and job["language"] == "python")
    while (received := messages.receive(connection)) is not None and "wall_s" in received[0]:
        run, (stdin,) = received
        try:
            folder.lay_out()
            answer, outputs = _Run(connection, job, run["wall_s"], stdin, means, compiled).answer()
            made = folder.fetch(job["outputs"])
        except OSError as error:
            answer, outputs, made = {"failure": f"the job's process cannot be prepared: {error}"}, [], {}
        connection.sendall(messages.pack({**answer, "made": list(made)}, [*outputs, *made.values()]))
        compiled.keep()


def _sealed(content: bytes) -> int:
    """Descriptor of a file in memory that can only be read."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class _Run:
    """One execution. The constructor forks the program."""

    def __init__(
        self,
        connection: socket.socket,
        job: dict[str, Any],
        wall_s: float,
        stdin: bytes,
        means: Confinement,
        compiled: CompiledCode,
    ) -> None:
        self._connection = connection
        self._limits = job["limits"]
        self._all = means.rung > 2
        self._no_memory = mmap(-1, 1)
        failure, told = os.pipe()
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        streams = (_sealed(stdin), *writers)
        self._deadline = time.monotonic() + wall_s
        self._pid = os.fork()
        if self._pid == 0:
            program.start(job, means, streams, told, self._no_memory, compiled)
        for descriptor in (*streams, told):
            os.close(descriptor)
        self._process = os.pidfd_open(self._pid)
        self._failure = failure
        self._outputs = {reader: bytearray() for reader in readers}
        self._open = set(readers)
        for reader in readers:
            os.set_blocking(reader, False)

    def answer(self) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to the owner, once the program and all that it has started have been killed or have ended."""
        cause = self._watch()
        self._kill()
        _, status, usage = os.wait4(self._pid, 0)
        self._reap_orphans()
        if not self._drain() and not cause:
            cause = "output"
        failure = os.read(self._failure, 1000).decode(errors="replace")
        answer = {
            "failure": failure,
            "cause": cause,
            "exit_code": os.waitstatus_to_exitcode(status),
            "out_of_memory": self._no_memory[0] == 1,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "peak": usage.ru_maxrss << 10,
        }
        for descriptor in (self._process, self._failure, *self._outputs):
            os.close(descriptor)
        out, err = (bytes(output) for output in self._outputs.values())
        return answer, [out[: self._limits["output"]], err[: max(0, self._limits["output"] - len(out))]]

    def _watch(self) -> str:
        """Waits for the program's end; returns the cause for which it has to be killed, or an empty string."""
        poller = select.poll()
        for descriptor in (*self._open, self._process):
            poller.register(descriptor, select.POLLIN)
        # An owner that has died or hung up; it sends nothing before the answer.
        poller.register(self._connection, select.POLLRDHUP)
        while True:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return "wall"
            ready = {descriptor for descriptor, _ in poller.poll(left_s * 1000 + 1)}
            for reader in ready & self._open:
                self._read(reader)
                if reader not in self._open:
                    poller.unregister(reader)
            if not self._within():
                return "output"
            if self._process in ready:
                return ""
            if self._connection.fileno() in ready:
                self._kill()
                os._exit(0)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        if self._all:  # in this namespace: all but its first process and this one
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)

    def _reap_orphans(self) -> None:
        if self._limits["processes"] > 1:
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()

    def _drain(self) -> bool:
        """Reads what is left in the pipes; False if that is too much."""
        ends = time.monotonic() + _CLOSE_S
        while self._open and self._within():
            ready, _, _ = select.select(self._open, [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                break
            for reader in ready:
                self._read(reader)
        return self._within()

    def _read(self, reader: int) -> None:
        data = os.read(reader, _READ_BYTES)
        self._outputs[reader] += data
        if not data:
            self._open.discard(reader)

    def _within(self) -> bool:
        return sum(map(len, self._outputs.values())) <= self._limits["output"]
