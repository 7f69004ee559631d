"""The keeper: reads jobs, runs the program of each once for each input, watches it to its end, and answers.

Invariants
  * A program over its time or output is killed with all that it has started, and the answer leaves after that.
  * Each run is a process of its own. This one executes nothing of a job, and no program is its fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import Any

from rollmesh.reward_service.sandbox import messages, program
from rollmesh.reward_service.sandbox.folder import JobFolder
from rollmesh.reward_service.sandbox.pressure import Pressure
from rollmesh.reward_service.sandbox.program import Confinement

_READ_BYTES = 1 << 16
# Seconds for the pipes of killed processes to close.
_CLOSE_S = 1.0
# To the zygote: whether all that a run has started is killed after it; the process to wait for, or 0 for a new one.
# A new one's descriptors: the job, three streams, the one for failures, and perhaps orders to successors.
ORDER, MOST_DESCRIPTORS = struct.Struct("?i"), 6
# From there, after a descriptor of the process: its status, CPU seconds by ticks and precisely, peak in bytes.
ENDED = struct.Struct("iddq")


def keep(
    connection: socket.socket, zygote: socket.socket, means: Confinement, no_memory: mmap, pressure: Pressure
) -> None:
    """Handles the jobs that come from `connection`, until the owner has hung up."""
    while (received := messages.receive(connection)) is not None:
        job, contents = received
        files = dict(zip(job["files"], contents, strict=True))
        folder = JobFolder(means.folder, files, job["limits"]["disk"] if means.rung > 2 else 0)
        _handle(connection, folder, _Processes(job, zygote, no_memory), pressure)


def _handle(connection: socket.socket, folder: JobFolder, processes: _Processes, pressure: Pressure) -> None:
    """Runs a job for each input that follows it."""
    while (received := messages.receive(connection)) is not None and "wall_s" in received[0]:
        run, (stdin,) = received
        outputs: list[bytes] = []
        made: dict[str, bytes] = {}
        try:
            folder.lay_out(last=run["last"])
            begun = _Run(connection, run, stdin, processes)
            stalled_s = pressure.stalled_s()
        except OSError as error:
            answer: dict[str, Any] = {"failure": f"the job's process cannot be prepared: {error}"}
        else:
            answer, outputs = begun.answer()
            if answer["cause"] == "wall" and stalled_s is not None:
                answer["stalled_s"] = (pressure.stalled_s() or stalled_s) - stalled_s
            made = folder.fetch(processes.outputs)
        connection.sendall(messages.pack({**answer, "made": list(made)}, [*outputs, *made.values()]))
    processes.end()
    folder.clear()


def _sealed(content: bytes) -> int:
    """Descriptor of a file in memory that can only be read."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the zygote has reaped it meanwhile
        signal.pidfd_send_signal(process, signal.SIGKILL)


class _Processes:
    """The processes of a job's runs: each is a fork of the zygote, or the successor of the one before."""

    def __init__(self, job: dict[str, Any], zygote: socket.socket, no_memory: mmap) -> None:
        self.limits = job["limits"]
        self.outputs = job["outputs"]
        self.no_memory = no_memory
        self.zygote = zygote
        self._job = _sealed(marshal.dumps(job))
        self._orders: socket.socket | None = None

    def begin(self, streams: Sequence[int], failure: int, *, last: bool) -> int:
        """Descriptor of a new run's process; see `program.start`."""
        # Programs can write to all of it; so no run finds what an earlier one has left.
        self.no_memory[:] = bytes(len(self.no_memory))
        # Where programs have several processes, all are killed after a run: a successor would be one of them.
        last = last or self.limits["processes"] > 1
        if pid := self._successor():
            assert self._orders is not None
            order = program.LAST if last else program.FOLLOWED
            socket.send_fds(self._orders, [order], [*streams, failure])
            return self._process(pid, [], last=last)
        if last:
            return self._process(0, [self._job, *streams, failure], last=True)
        self._orders, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            return self._process(0, [self._job, *streams, failure, theirs.fileno()], last=False)

    def end(self) -> None:
        """Ends the successor that waits."""
        os.close(self._job)
        if pid := self._successor():
            process = self._process(pid, [], last=True)
            _kill(process)
            os.close(process)
            self.ended()
        if self._orders is not None:
            self._orders.close()

    def ended(self) -> tuple[int, float, float, int]:
        """Waits for the end of the process that has begun; see `ENDED`."""
        told = self.zygote.recv(ENDED.size)
        if not told:  # without the zygote, this process is of no use
            os._exit(1)
        return ENDED.unpack(told)

    def _process(self, pid: int, descriptors: Sequence[int], *, last: bool) -> int:
        socket.send_fds(self.zygote, [ORDER.pack(last, pid)], descriptors)
        told, received, _, _ = socket.recv_fds(self.zygote, 1000, 1)
        if not told:
            os._exit(1)
        if not received:
            raise OSError(told.decode())
        return received[0]

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
        self._deadline = time.monotonic() + run["wall_s"]
        opened = [_sealed(stdin)]
        try:
            for _ in range(3):
                opened += os.pipe()
            given, out, out_end, err, err_end, failure, told = opened
            self._process = processes.begin((given, out_end, err_end), told, last=run["last"])
        except OSError:
            _close(opened)
            raise
        _close((given, out_end, err_end, told))
        readers = (out, err)
        self._failure = failure
        self._outputs = {reader: bytearray() for reader in readers}
        self._open = set(readers)
        for reader in readers:
            os.set_blocking(reader, False)

    def answer(self) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to the owner, once the program and all that it has started have been killed or have ended."""
        cause = self._watch()
        if cause:
            _kill(self._process)
        status, ticked_s, cpu_s, peak = self._processes.ended()
        exit_code = os.waitstatus_to_exitcode(status)
        # The limit goes by ticks, which differ from the precise time by a tenth and more.
        if not cause and exit_code == -signal.SIGKILL and ticked_s >= math.ceil(self._limits["cpu_s"]):
            cause = "cpu"
        if not self._drain() and not cause:
            cause = "output"
        failure = os.read(self._failure, 1000).decode(errors="replace")
        answer = {
            "failure": failure,
            "cause": cause,
            "exit_code": exit_code,
            "out_of_memory": self._processes.no_memory[0] == 1,
            "cpu_s": cpu_s,
            "peak": peak,
            "stalled_s": None,
        }
        _close((self._process, self._failure, *self._outputs))
        out, err = (bytes(output) for output in self._outputs.values())
        return answer, [out[: self._limits["output"]], err[: max(0, self._limits["output"] - len(out))]]

    def _watch(self) -> str:
        """Waits for the program's end; returns the cause for which it has to be killed, or an empty string."""
        poller = select.poll()
        ended = self._processes.zygote.fileno()
        for descriptor in (*self._open, ended):
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
            if ended in ready:
                return ""
            if self._connection.fileno() in ready:
                os._exit(0)

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
