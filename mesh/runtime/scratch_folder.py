"""Scratch folders that a killed program leaves to the next one, which removes them.

Invariant: a folder is locked (flock) for as long as its program lives. So a free lock marks the folder of a killed
program, whatever the namespace of process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder that other users cannot read; removed at the end.

    Args:
        prefix: of its name. Folders of this prefix from killed programs are removed first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as locks:
            if _lock(left, locks):
                shutil.rmtree(left, ignore_errors=True)
    with contextlib.ExitStack() as locks:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=prefix))
            try:
                if _lock(folder, locks):
                    break
            except OSError as error:
                # Another program has taken it for abandoned, or the disk has no locks: then none removes it.
                if folder.exists() and not isinstance(error, BlockingIOError):
                    break
        owner = os.getpid()
        try:
            yield folder
        finally:
            # Processes that were forked within the block leave it too.
            if os.getpid() == owner:
                shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, locks: contextlib.ExitStack) -> bool:
    """Locks a folder until `locks` are closed; False where it was removed before, or is another user's.

    Raises:
        BlockingIOError: another program holds it.
        OSError: it cannot be locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    locks.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder.exists() and folder.stat().st_uid == os.getuid()
