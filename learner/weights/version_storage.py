"""The bytes of one published version: a file in shared memory, or anonymous memory.

Invariants: a shared file appears under its name only when it is whole, and never changes afterwards. Until then the
processes of its publisher write into it, by its address in /proc. It is locked (flock) for as long as its publisher
lives. So a free lock marks the file of a killed publisher, whatever the namespace of process ids. A reader that has it
open keeps it after it was unlinked. All memory of a file is taken when it is made: writing into it never fails.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
from pathlib import Path

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights.shared_files import FILE_PREFIX

log = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None)
_POPULATE_WRITE = 23


class VersionBytes:
    """A finished version; may be read from any thread.

    Attributes:
        path: the file in shared memory; None for anonymous memory.
        nbytes: length.
    """

    def __init__(self, mapping: mmap.mmap, path: Path | None) -> None:
        # The mapping duplicates the descriptor, and with it holds the lock.
        self._map = mapping
        self.path = path
        self.nbytes = len(mapping)

    def view(self) -> memoryview:
        """All bytes, read-only and not copied; they stay as long as a view of them."""
        return memoryview(self._map).toreadonly()

    def unlink(self) -> None:
        """Unlinks the file; running transfers continue, the memory is freed with the last reader."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class VersionFile:
    """The bytes of a version that is being written; then it is sealed, or closed.

    Args:
        directory: a tmpfs that receivers can see; None for anonymous memory.
        nbytes: of the version.
        fall_back: take anonymous memory where the tmpfs takes no more.

    Raises:
        WeightsError: there is not so much memory.
    """

    def __init__(self, directory: Path | None, nbytes: int, *, fall_back: bool) -> None:
        try:
            self._descriptor = _allocate(directory, nbytes)
        except OSError as error:
            if directory is None or not fall_back:
                raise _no_memory(directory, nbytes, error) from error
            log.warning(
                "%s takes no more (%s): weights are sent over grpc from now on; lower weights.keep_versions",
                directory,
                error.strerror,
            )
            directory = None
            try:
                self._descriptor = _allocate(None, nbytes)
            except OSError as refused:
                raise _no_memory(None, nbytes, refused) from refused
        self._directory = directory
        self._map = mmap.mmap(self._descriptor, nbytes)

    @property
    def address(self) -> str:
        """The place where other processes of this host and user open it, and its identity: see `open_version`."""
        status = os.fstat(self._descriptor)
        return f"/proc/{os.getpid()}/fd/{self._descriptor}:{status.st_dev}:{status.st_ino}"

    def view(self) -> memoryview:
        """All bytes, writable; zeros at first."""
        return memoryview(self._map)

    def seal(self, name: str) -> VersionBytes:
        """Gives a shared file its name; no one writes any more.

        Args:
            name: readable part of the file name.

        Raises:
            WeightsError: the tmpfs does not take the name.
        """
        path = None
        try:
            if self._directory is not None:
                path = self._directory / f"{FILE_PREFIX}{name}-{os.getpid()}-{secrets.token_hex(4)}"
                _link(self._descriptor, path)
        except OSError as error:
            raise WeightsError(
                f"cannot create a file in {self._directory}: {error.strerror}", hint="set weights.transport: grpc"
            ) from error
        finally:
            self.close()
        return VersionBytes(self._map, path)

    def close(self) -> None:
        """Gives the file up, where it was not sealed; its memory is freed with the last view."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _no_memory(directory: Path | None, nbytes: int, error: OSError) -> WeightsError:
    return WeightsError(
        f"no memory for a version of the weights ({nbytes / 1e9:.1f} GB) in {directory or 'this host'}: "
        f"{error.strerror}",
        hint="give the machine more memory or shared memory (containers: --shm-size), lower "
        "weights.keep_versions, or set weights.transport: grpc",
    )


def open_version(address: str) -> memoryview:
    """A version's bytes in another process of its publisher, writable.

    Args:
        address: as of `VersionFile`.

    Raises:
        OSError: it is not on this host.
    """
    path, device, inode = address.split(":")
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (int(device), int(inode)):
            raise FileNotFoundError(errno.ENOENT, "another file is there", path)
        return memoryview(mmap.mmap(descriptor, status.st_size))
    finally:
        os.close(descriptor)


def touch_pages(data: memoryview) -> None:
    """Maps the pages of a writable range, so that writing into it later takes no faults: most of what it would cost.

    A kernel before 5.14 refuses, and nothing happens.
    """
    if data:
        first = ctypes.addressof(ctypes.c_char.from_buffer(data))
        start = first - first % mmap.PAGESIZE
        # Unlike Python's own call this one lets other threads run.
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(first + len(data) - start), _POPULATE_WRITE)


def _allocate(directory: Path | None, nbytes: int) -> int:
    """A descriptor of an unnamed file with all its memory allocated."""
    descriptor = _open_unnamed(directory)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open_unnamed(directory: Path | None) -> int:
    if directory is None:
        return os.memfd_create("rollmesh-weights")
    descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
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
    except OSError:
        return False
    return True
