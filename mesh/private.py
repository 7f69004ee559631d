"""Folders that are their user's alone, whatever the umask: runs, with all that was sampled, and secrets.

Invariants: who cannot enter a folder can neither read what is below it nor connect to its sockets. A folder that was
there is left as it is, since its owner may want to share it; who needs it private says so.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS = 0o077


def private_folder(path: Path) -> None:
    """Makes the folder, with its parents, for its user alone.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def close_to_others(path: Path) -> None:
    """Takes every right on a folder or file from all but its owner.

    Raises:
        OSError: it is not ours, or is not there.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        path.chmod(mode & ~_OTHERS)


def open_to_others(path: Path) -> bool:
    """Whether another user may read a folder, or enter it."""
    return bool(path.stat().st_mode & _OTHERS)


def keep_private() -> None:
    """What this process and its children make from now on is their user's alone."""
    os.umask(_OTHERS)
