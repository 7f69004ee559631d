"""A forked process: its handle in the parent, and its setup in the child."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path


class ForkedProcess:
    """A child process that was forked, as far as `subprocess.Popen` has the same.

    Attributes:
        pid: its process id.
        returncode: exit status, or the negative number of the signal that has ended it; None before that is known.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._file = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The return code, if it has ended."""
        with self._lock:
            if self.returncode is None and ends_within(self._file, 0.0):
                self.returncode = _reap(self.pid)
                os.close(self._file)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the return code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self.returncode is None:
            # Another thread may reap it meanwhile, and close its file.
            with self._lock:
                watched = os.dup(self._file) if self.returncode is None else os.open(os.devnull, os.O_RDONLY)
            try:
                ends_within(watched, timeout)
            finally:
                os.close(watched)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal; one that has ended stays as it is."""
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._file, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def ends_within(process: int, seconds: float | None) -> bool:
    """Waits for the end of a process, given as a file of `os.pidfd_open`; says whether it has ended.

    Args:
        process: the file; or any other, which counts as ended once there is something to read.
        seconds: to wait at most; None: no limit.
    """
    poll = select.poll()  # `select` takes no file from number 1024 on
    poll.register(process, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def _reap(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        # Where SIGCHLD is ignored the kernel keeps no status. `Popen` reports 0 too.
        return 0


@cache
def can_fork_here() -> bool:
    """Whether this kernel has what forked processes need: Linux from 5.3 on, without a filter of system calls."""
    try:
        file = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(file, 0)
        finally:
            os.close(file)
        # gVisor reports neither.
        return own_status().keys() >= {"SigIgn", "Umask"}
    except (AttributeError, OSError):
        return False


def own_status() -> dict[str, str]:
    """The kernel's account of this process, in its own words by name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: value for name, _, value in (line.partition(":\t") for line in lines)}


def has_one_thread() -> bool:
    """Whether a fork of this process would lose no thread; False if that is unknown."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return False


def reseed() -> None:
    """Reseeds the generators copied from the parent."""
    # The standard library's generators do so themselves; torch's seed is the same in every new process.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
