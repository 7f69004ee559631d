"""Files of published weights in shared memory: where they lie, and how they are named.

Publishers make no others, and receivers open no others: a path that comes from the network leads to nothing else.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  meant to be shared; files are created unnamed and readable by the owner only
FILE_PREFIX = "rollmesh-weights-"


def is_shared_file(address: str, directory: Path) -> bool:
    """True if a path names a publisher's file directly in `directory`."""
    folder, name = os.path.split(address)
    return folder == str(directory) and name.startswith(FILE_PREFIX) and "\0" not in name


def sweep(directory: Path) -> list[Path]:
    """Removes the files of publishers that are gone, whose locks are free; returns their paths."""
    removed = []
    for path in directory.glob(f"{FILE_PREFIX}*"):
        try:
            # Not waiting: opening a pipe of another program would wait for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # unlinked meanwhile, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path)
        except OSError:
            continue  # its publisher lives, another one has removed it, or it is not ours to remove
        finally:
            os.close(descriptor)
    return removed
