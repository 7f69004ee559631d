"""The lock that a redis-server holds on its folder as long as it runs.

Invariants
  * The server inherits the lock, so it needs no owner: a server still has it after its owner's death.
  * Its children inherit the lock as well; one of them rewrites the append-only file. They may outlive the server,
    stopped or in the middle of a long write. Their work is of no use then, so they are killed.
  * A server that lives, and its children, are never killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path

import psutil

from rollmesh.mesh.errors import RunBusyError
from rollmesh.mesh.liveness.process_ends import survivors

log = logging.getLogger(__name__)
_PATIENCE_S = 10.0


async def acquire_lock(lock: BufferedWriter) -> None:
    """Takes the lock once no other redis-server (a predecessor that is still shutting down) has it.

    Raises:
        RunBusyError: another one keeps it.
    """
    path = Path(lock.name)
    deadline = asyncio.get_running_loop().time() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if asyncio.get_running_loop().time() > deadline:
                raise RunBusyError(
                    f"another redis-server uses {path.parent}",
                    hint="is this run active already? choose another run.name, or stop it",
                ) from None
        end_leftovers(path)
        # Locks of files offer no event to wait for; this loop is bounded by the deadline above.
        await asyncio.sleep(0.05)


def end_leftovers(lock: Path) -> None:
    """Kills processes that servers of the folder have started and left; a server leads the session of all that it
    starts."""
    for process in _without_leader():
        with contextlib.suppress(psutil.Error):
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                log.warning("killing process %d, left by a dead redis-server", process.pid)
                process.kill()


def _without_leader() -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            session = os.getsid(pid)
            if session not in (0, pid) and not survivors([session]):
                yield psutil.Process(pid)
