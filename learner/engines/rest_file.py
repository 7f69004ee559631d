"""A file without a name that holds the memory of tensors while they rest on a CPU: memory alone would free nothing.

The pages of the file are the kernel's, which drops them where memory is short. They are written and read by calls, for
the pages of a mapped file count as the process's own. Nothing is synced: the file is for this process alone.

Invariants: the file has no name in its folder, so it is gone with its process, however that ends. Each byte is in
memory until it is in the file, and in the file until it is back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import UntypedStorage

from rollmesh.mesh.errors import MemoryHeldError, RollmeshError, SwapError

_CALL_BYTES = 64 << 20
# File systems that reserve nothing ahead answer so: there the write itself fails.
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


class LostTensorsError(RollmeshError):
    """Tensors are neither in memory nor can they be read: only a new process has them again, from a checkpoint."""

    code = "lost_tensors"
    exit_code = MemoryHeldError.exit_code


class RestFile:
    """The bytes of some storages, one after another.

    Args:
        folder: the file's; it is made where it is absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1

    def take(self, storages: Sequence[tuple[UntypedStorage, int]]) -> None:
        """Writes storages and frees their memory, one after another.

        Args:
            storages: on the CPU, with their bytes.

        Raises:
            SwapError: the disk refuses them; all of them are in memory as before.
            LostTensorsError: it refuses them, and does not give back those that it has taken.
        """
        self.close()
        total = sum(size for _, size in storages)
        taken: list[tuple[UntypedStorage, int]] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                self._descriptor = os.dup(file.fileno())
            _reserve(self._descriptor, total)
            place = 0
            for storage, size in storages:
                self._transfer(os.pwritev, storage, size, place)
                storage.resize_(0)
                taken.append((storage, size))
                place += size
        except OSError as error:
            reason = (
                f"{_size(total)} of state cannot be written to {self._folder}: {error.strerror or error}"
                f"{_free(self._folder)}"
            )
            self._read_back(taken, reason)
            self.close()
            wanted = "with more room" if error.errno in _NO_ROOM else "that this user may write to"
            raise SwapError(reason, hint=f"set placement.rest_dir to a folder {wanted}") from error

    def restore(self, storages: Sequence[tuple[UntypedStorage, int]], *, keep: bool = False) -> None:
        """Reads storages back into memory, and gives the file up.

        Args:
            storages: those of `take`.
            keep: the file stays, for the same bytes another time.

        Raises:
            RuntimeError: there is no memory; all of them are in the file as before.
            OSError: the disk has lost them.
        """
        self._read(storages)
        if not keep:
            self.close()

    def close(self) -> None:
        """Gives the bytes up."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _read_back(self, taken: Sequence[tuple[UntypedStorage, int]], reason: str) -> None:
        try:
            self._read(taken)
        except (OSError, RuntimeError) as error:
            lost = _size(sum(size for _, size in taken))
            raise LostTensorsError(
                f"{reason}; {lost} of it were written, and cannot be read again: {error}",
                hint="the learner has to start again, at its last checkpoint; is the disk sound?",
            ) from error

    def _read(self, storages: Sequence[tuple[UntypedStorage, int]]) -> None:
        place = 0
        try:
            for storage, size in storages:
                storage.resize_(size)
                self._transfer(os.preadv, storage, size, place)
                place += size
        except (OSError, RuntimeError):
            for storage, _ in storages:
                storage.resize_(0)
            raise

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], storage: UntypedStorage, size: int, place: int
    ) -> None:
        """Writes or reads all bytes of a storage at a place of the file."""
        # Not by numpy: a storage that it has seen cannot be resized any more.
        data = memoryview((ctypes.c_char * size).from_address(storage.data_ptr())).cast("B")
        done = 0
        while done < size:
            moved = call(self._descriptor, [data[done : done + _CALL_BYTES]], place + done)
            if moved <= 0:
                raise OSError(errno.EIO, "the file ends too early")
            done += moved


def _reserve(descriptor: int, nbytes: int) -> None:
    """Reserves room, so that a full disk refuses before anything has moved."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_RESERVATION:
            raise


def _size(nbytes: float) -> str:
    power = 0
    while nbytes >= 1000 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.{min(power, 1)}f} {_UNITS[power]}"


def _free(folder: Path) -> str:
    try:
        return f", {_size(shutil.disk_usage(folder).free)} free on its disk"
    except OSError:
        return ""
