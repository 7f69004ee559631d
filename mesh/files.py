"""Files that are written whole or not at all, and durable ones."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str, *, durable: bool = False) -> None:
    """Writes a file whole or not at all: readers find the former content or the new one.

    Args:
        path: in a folder that exists.
        text: the whole content.
        durable: on disk at the return, whatever becomes of the machine.

    Raises:
        OSError: the disk refuses.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    if durable:
        fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Makes a file, or the entries of a folder, durable.

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
