"""The keeper: reads one job, runs its program once for each input, watches it to its end, answers, and ends.

Invariants
  * A program over its time or output is killed with all that it has started, and the answer leaves after that.
  * Each run is a process of its own. This one executes and reads nothing of the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from mmap import mmap
from typing import Any

from rollmesh.reward_service.sandbox import linux, messages, program
from rollmesh.reward_service.sandbox.folder import JobFolder
from rollmesh.reward_service.sandbox.program import Confinement

_READ_BYTES = 1 << 16
# Seconds for the pipes of killed processes to close.
_CLOSE_S = 1.0
# Part of a clock's id: user and system time of a process as RLIMIT_CPU counts it. Source: linux/posix-timers.h.
_TICKS = 0


def keep(connection: socket.socket, means: Confinement) -> None:
    """Runs the job that is waiting in `connection` for each input that follows, and answers there."""
    linux.die_with_parent()
    # Successors, and what a program with several processes leaves, become children of this one.
    linux.take_orphans()
    received = messages.receive(connection)
    if received is None:
        return
    job, contents = received
    files = dict(zip(job["files"], contents, strict=True))
    folder = JobFolder(means.folder, files, job["limits"]["disk"] if means.rung > 2 else 0)
    processes = _Processes(job, means)
    while (received := messages.receive(connection)) is not None and "wall_s" in received[0]:
        run, (stdin,) = received
        try:
            folder.lay_out(last=run["last"])
            answer, outputs = _Run(connection, run, stdin, processes).answer()
            made = folder.fetch(job["outputs"])
        except OSError as error:
            answer, outputs, made = {"failure": f"the job's process cannot be prepared: {error}"}, [], {}
        connection.sendall(messages.pack({**answer, "made": list(made)}, [*outputs, *made.values()]))
    processes.end()


def _sealed(content: bytes) -> int:
    """Descriptor of a file in memory that can only be read."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class _Processes:
    """The processes of a job's runs: each is forked from this one, or is the successor of the one before."""

    def __init__(self, job: dict[str, Any], means: Confinement) -> None:
        self.limits = job["limits"]
        self.several = self.limits["processes"] > 1
        self.no_memory = mmap(-1, 1)
        self._job = job
        self._means = means
        self._orders: socket.socket | None = None

    def begin(self, streams: Sequence[int], failure: int, *, last: bool) -> int:
        """The id of a new run's process, a child of this one; see `program.start`."""
        self.no_memory[0] = 0
        if pid := self._successor():
            assert self._orders is not None
            order = program.LAST if last else program.FOLLOWED
            socket.send_fds(self._orders, [order], [*streams, failure])
            return pid
        theirs = None
        # Where programs have several processes, all are killed after a run: a successor would be one of them.
        if not (last or self.several):
            self._orders, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            program.start(self._job, self._means, streams, failure, self.no_memory, theirs)
        if theirs is not None:
            theirs.close()
        return pid

    def end(self) -> None:
        """Ends the successor that waits."""
        if pid := self._successor():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _successor(self) -> int:
        """The id of the one that waits; 0 if there is none."""
        if self._orders is None:
            return 0
        if pid := int.from_bytes(self._orders.recv(4), sys.byteorder):
            return pid
        self._orders.close()
        self._orders = None
        return 0


class _Run:
    """One execution. The constructor begins it."""

    def __init__(self, connection: socket.socket, run: dict[str, Any], stdin: bytes, processes: _Processes) -> None:
        self._connection = connection
        self._limits = processes.limits
        self._processes = processes
        failure, told = os.pipe()
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        streams = (_sealed(stdin), *writers)
        self._deadline = time.monotonic() + run["wall_s"]
        self._pid = processes.begin(streams, told, last=run["last"])
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
        over = not cause and self._over_cpu()
        self._kill()
        _, status, usage = os.wait4(self._pid, 0)
        self._reap_orphans()
        if not self._drain() and not cause:
            cause = "output"
        exit_code = os.waitstatus_to_exitcode(status)
        if over and exit_code == -signal.SIGKILL:
            cause = "cpu"
        failure = os.read(self._failure, 1000).decode(errors="replace")
        answer = {
            "failure": failure,
            "cause": cause,
            "exit_code": exit_code,
            "out_of_memory": self._processes.no_memory[0] == 1,
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

    def _over_cpu(self) -> bool:
        """Whether the program, which has ended, had used its CPU time by the count that the kernel's limit goes by.

        That one is kept in ticks, and differs from the time in `usage` by a tenth and more.
        """
        clock = ~self._pid << 3 | _TICKS
        return time.clock_gettime(clock) >= math.ceil(self._limits["cpu_s"])

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        if self._processes.several:  # in this namespace: all but its first process and this one
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)

    def _reap_orphans(self) -> None:
        if self._processes.several:
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
