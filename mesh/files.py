"""Files that are written whole or not at all, durable ones, and those that no one should wait for."""

from __future__ import annotations

import os
from pathlib import Path

from rollmesh.mesh.errors import DataError


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


def refuse_special_files(folder: Path) -> None:
    """Refuses a folder with a named pipe, a socket or a device: to open one could wait for ever.

    Args:
        folder: that is read. Its folders are not looked into, and links that lead nowhere are left alone.

    Raises:
        DataError: names the file; or the folder cannot be listed.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder} cannot be listed: {error.strerror}", hint="give a folder that you can read"
        ) from error
    for path in paths:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(
                f"{path} is a pipe, a socket or a device, not a regular file",
                hint="remove it, or copy the folder again",
            )
