"""Runs a command that cannot outlive the process that started it.

Executed as a script by the launcher (`python -S -E supervised.py PARENT_PID COMMAND...`): asks the kernel to kill
this process when its parent dies, then becomes the command. The request survives `execve`, so even a launcher ended
by `kill -9` leaves nothing behind. A script of its own, not a `preexec_fn`: code run between fork and exec in a
program with threads may deadlock. Imports the standard library only, because it runs before every service.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Replaces this process by `argv[1:]`; `argv[0]` is the process id of the parent to live and die with."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the request was made; then no signal will ever come.
    if os.getppid() != int(argv[0]):
        raise SystemExit(128 + signal.SIGKILL)
    os.execvp(argv[1], argv[1:])  # noqa: S606  # no shell is wanted: the arguments are a list of our own


if __name__ == "__main__":
    main(sys.argv[1:])
