"""A process that was forked, as its parent and as it itself see it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from typing import Any

_PR_SET_PDEATHSIG = 1


class Forked:
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
            if self.returncode is None and select.select([self._file], [], [], 0)[0]:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
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
                select.select([watched], [], [], timeout)
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


def has_one_thread() -> bool:
    """Whether a fork of this process would lose no thread; False if that is unknown."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return False


def become_another() -> None:
    """Forgets in a forked process the random state that it shares with its parent."""
    # The standard library's generators do so themselves; torch's seed is the same in every new process.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)


def end_with(parent: int) -> None:
    """Ends this process as soon as the main thread of its parent has ended."""
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def prctl(option: int, argument: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
