"""Runs a command that cannot outlive the process that started it.

Executed as a script (`python -S -E die_with_parent.py SIGNAL PARENT_PID COMMAND...`, see `die_with_parent`):
asks the kernel to signal this process when its parent dies, then becomes the command. The request survives `execve`,
so even a parent ended by `kill -9` leaves no child. It is a script and not a `preexec_fn`: code run between fork and
exec in a program with threads may deadlock. A garbage collection there may run destructors of threads that the child
lacks. Imports the standard library only, because it runs before every service.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent(command: Sequence[str], on_death: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command line of a child that gets `on_death` when this process dies (Linux only)."""
    return [sys.executable, "-S", "-E", __file__, str(int(on_death)), str(os.getpid()), *command]


def end_with(parent: int, on_death: int = signal.SIGKILL) -> None:
    """Has this process get a signal as soon as the main thread of its parent has ended (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(on_death), 0, 0, 0)
    # The parent may have died before the request was made; then no signal will ever come.
    if os.getppid() != parent:
        os._exit(128 + on_death)


def main(argv: list[str]) -> None:
    """Replaces this process by `argv[2:]`; before it stand the signal and the process id of the parent."""
    end_with(int(argv[1]), int(argv[0]))
    os.execvp(argv[2], argv[2:])  # noqa: S606  # no shell is wanted: the arguments are a list of our own


if __name__ == "__main__":
    main(sys.argv[1:])
