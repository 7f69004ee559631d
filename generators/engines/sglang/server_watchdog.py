"""Ends the server with the generator that owns it, however that ends: a process between the two.

Run as a script by the server's interpreter, which need not have this project's packages: standard library alone.

    server_watchdog.py SCRATCH COMMAND...

It starts the command in a session of its own. When standard input ends (the generator has closed it, or has died) or
the command ends by itself, it kills the whole process group. Then it removes what these processes have left in
/dev/shm, and, once standard input has ended, the folder SCRATCH. Should the watchdog itself be killed, the kernel kills
the command. On standard output it says `exit CODE` when the command has ended by itself (negative: by that signal).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_KILL_S = 20.0
_LOOK_S = 5.0
_SHARED = "/dev/shm/"  # noqa: S108  # where the kernel has it
_IN_CREATE = 0x100
_NEWS_BYTES = 65536


def main(scratch: str, command: list[str]) -> None:
    """Runs the command until it or standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watchdog = os.getpid()
    child = os.fork()
    if child == 0:
        _exec(command, watchdog)
    handle = os.pidfd_open(child)
    # Read while the processes are there: afterwards it is unknown what was theirs.
    shared_files: set[str] = set()
    news = _watch_shared_memory()
    ready: list[int] = []
    while not {0, handle} & set(ready):
        ready, _, _ = select.select([0, handle, *news], [], [], _LOOK_S)
        for watch in {*news} & set(ready):
            os.read(watch, _NEWS_BYTES)
        shared_files |= _shared_memory(child)
    # One that has just been forked leads no group yet; once it is dead it starts no more processes.
    os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _await_group(child)
    for path in shared_files:
        with contextlib.suppress(OSError):
            os.unlink(path)
    if 0 not in ready:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, f"exit {code}\n".encode())
        while os.read(0, 1024):
            pass
    shutil.rmtree(scratch, ignore_errors=True)


def _exec(command: list[str], watchdog: int) -> None:
    """Turns this process into the command."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != watchdog:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    try:
        os.execvp(command[0], command)  # noqa: S606  # no shell is wanted
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
        os._exit(127)


def _group(leader: int) -> list[Path]:
    """Folders in /proc of the living processes of a group; zombies may stay for as long as the machine runs."""
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(folder.name)) == leader and not _is_zombie(folder):
                    members.append(folder)
    return members


def _is_zombie(folder: Path) -> bool:
    state, *_ = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return state == "Z"


def _watch_shared_memory() -> list[int]:
    """A descriptor that can be read when a file is made in /dev/shm; none where the kernel has no more of them.

    So a file is known from its first moment, also to a server that dies in the next one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_CLOEXEC)
    if watch < 0:
        return []
    if libc.inotify_add_watch(watch, _SHARED.encode(), _IN_CREATE) < 0:
        os.close(watch)
        return []
    return [watch]


def _shared_memory(leader: int) -> set[str]:
    """Files in /dev/shm that a group has open or mapped."""
    names = set()
    for folder in _group(leader):
        places: list[str] = []
        with contextlib.suppress(OSError):
            places += (folder / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        with contextlib.suppress(OSError):
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    places.append(str(link.readlink()))
        for place in places:
            _, folder_of_it, name = place.partition(_SHARED)
            # torch's own files are the generator's, and removed by torch.
            if folder_of_it and not name.endswith("(deleted)") and not name.startswith("torch_"):
                names.add(_SHARED + name)
    return names


def _await_group(leader: int) -> None:
    """Waits until no process of a group is left: each wakes us with its end, though none is our child."""
    end = time.monotonic() + _KILL_S
    while (members := _group(leader)) and time.monotonic() < end:
        for folder in members:
            with contextlib.suppress(OSError):
                # One that is gone by now cannot be opened.
                handle = os.pidfd_open(int(folder.name))
                select.select([handle], [], [], max(0.0, end - time.monotonic()))
                os.close(handle)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
