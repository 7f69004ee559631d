"""The bytes of one published version: a file in shared memory, or anonymous memory.

Invariants: a shared file appears under its name only when it is whole, and never changes afterwards. It is locked
(flock) for as long as its publisher lives. So a free lock marks the file of a killed publisher, whatever the namespace
of process ids. A reader that has it open keeps it after it was unlinked.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
from pathlib import Path

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights.digest import Buffer
from rollmesh.mesh.weights.shared_files import FILE_PREFIX

log = logging.getLogger(__name__)
_COPY_BYTES = 16 << 20


class VersionBytes:
    """A finished version; may be read from any thread.

    Attributes:
        path: the file in shared memory; None for anonymous memory.
        nbytes: length.
    """

    def __init__(self, descriptor: int, nbytes: int, path: Path | None) -> None:
        # The mapping duplicates the descriptor, and with it holds the lock.
        self._map = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ)
        self.path = path
        self.nbytes = nbytes

    def view(self) -> memoryview:
        """All bytes, read-only and not copied; they stay as long as a view of them."""
        return memoryview(self._map)

    def unlink(self) -> None:
        """Unlinks the file; running transfers continue, the memory is freed with the last reader."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class VersionWriter:
    """Writes one version from front to back, then `seal`s it, or is `abandon`ed.

    Args:
        directory: a tmpfs that receivers can see; None for anonymous memory.
        fall_back: continue in anonymous memory where the tmpfs is full.
    """

    def __init__(self, directory: Path | None, *, fall_back: bool) -> None:
        self._directory = directory
        self._fall_back = fall_back
        self._descriptor = _open_unnamed(directory)
        self._end = 0

    def write(self, data: Buffer, offset: int) -> None:
        """Writes `data` at `offset` bytes; gaps read as zeros.

        Raises:
            WeightsError: the memory is exhausted.
        """
        view = memoryview(data)
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._descriptor, view[done:], offset + done)
            except OSError as error:
                if error.errno != errno.ENOSPC or self._directory is None or not self._fall_back:
                    raise WeightsError(
                        f"cannot write the weights to {self._directory or 'memory'}: {error.strerror}",
                        hint="give the machine more memory or shared memory (containers: --shm-size), "
                        "or set weights.transport: grpc",
                    ) from error
                self._move_to_anonymous_memory()
        self._end = max(self._end, offset + done)

    def seal(self, name: str, nbytes: int) -> VersionBytes:
        """Ends the writing and gives a shared file its name.

        Args:
            name: readable part of the file name.
            nbytes: final length; at least the written one.
        """
        try:
            os.ftruncate(self._descriptor, nbytes)
            path = None
            if self._directory is not None:
                path = self._directory / f"{FILE_PREFIX}{name}-{os.getpid()}-{secrets.token_hex(4)}"
                _link(self._descriptor, path)
            return VersionBytes(self._descriptor, nbytes, path)
        finally:
            os.close(self._descriptor)

    def abandon(self) -> None:
        """Drops everything written."""
        os.close(self._descriptor)

    def _move_to_anonymous_memory(self) -> None:
        log.warning("%s is full: weights of this run travel over grpc from now on", self._directory)
        target = _open_unnamed(None)
        for offset in range(0, self._end, _COPY_BYTES):
            part = os.pread(self._descriptor, min(_COPY_BYTES, self._end - offset), offset)
            os.pwrite(target, part, offset)
        os.close(self._descriptor)
        self._descriptor, self._directory = target, None


def _open_unnamed(directory: Path | None) -> int:
    if directory is None:
        return os.memfd_create("rollmesh-weights")
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        raise WeightsError(
            f"cannot create a file in {directory}: {error.strerror}", hint="set weights.transport: grpc"
        ) from error
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _link(descriptor: int, path: Path) -> None:
    # Naming the directory twice makes Python use linkat(2), which alone can follow the link in /proc.
    folder = os.open(path.parent, os.O_DIRECTORY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def usable_directory(directory: Path) -> bool:
    """True where files can be created there."""
    try:
        os.close(_open_unnamed(directory))
    except WeightsError:
        return False
    return True


def sweep(directory: Path) -> list[Path]:
    """Removes the files of publishers that are gone; returns their paths."""
    removed = []
    for path in directory.glob(f"{FILE_PREFIX}*"):
        try:
            # Not waiting: opening a pipe of another program would wait for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # unlinked meanwhile, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except OSError:
            continue  # its publisher lives, or the file is not ours to remove
        finally:
            os.close(descriptor)
    return removed
