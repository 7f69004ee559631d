"""Files that are written whole or not at all, durable ones, and those that no one should wait for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rollmesh.mesh.errors import ConfigError, DataError


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Writes a file whole or not at all: readers find the former content or the new one.

    Args:
        path: in a folder that exists.
        content: the whole of it; a text is written as UTF-8.
        durable: on disk at the return, whatever becomes of the machine.

    Raises:
        OSError: the disk refuses.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    if durable:
        fsync_path(path.parent)


def require_writable(folder: Path, key: str) -> None:
    """Makes a folder that the configuration names, and writes a file there that is gone at once.

    Args:
        folder: may exist.
        key: that names it, for the error.

    Raises:
        ConfigError: files cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"1")
    except OSError as error:
        raise ConfigError(
            f"{key}: files cannot be written to {folder}: {error.strerror or error}",
            hint="set it to a folder on a disk that you may write to",
        ) from error


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
