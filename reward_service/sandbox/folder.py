"""The folder in which a job's programs run: its files, what has become of them, and those that a program has made."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence

from rollmesh.reward_service.sandbox import linux, namespaces

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe would block, and a link leads away.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class JobFolder:
    """A job's files, laid out once, and again where a program has changed them.

    Args:
        path: the zygote's folder for programs, empty.
        files: contents by name.
        size: bytes that the folder may hold; 0 where programs write nothing.
    """

    def __init__(self, path: str, files: dict[str, bytes], size: int) -> None:
        self._path = path
        self._files = files
        self._size = size
        self._laid_out: list[tuple[int, ...]] | None = None

    def lay_out(self, *, last: bool) -> None:
        """Makes the folder as the job describes it, unless it is; after the last time, changes are not looked for.

        Raises:
            OSError: it cannot be made, for example because its size does not suffice.
        """
        if self._laid_out is not None:
            if not self._size or self._laid_out == self._state():
                return
            linux.unmount(self._path)
            self._laid_out = None
        if self._size:
            namespaces.give_folder(self._path, self._size)
        try:
            for name, content in self._files.items():
                path = os.path.join(self._path, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb", opener=_executable) as file:
                    file.write(content)
        except OSError:
            self.clear()
            raise
        self._laid_out = self._state() if self._size and not last else []

    def clear(self) -> None:
        """Leaves the zygote's folder empty for the next job."""
        if self._size:
            with contextlib.suppress(OSError):  # the job had not got as far
                linux.unmount(self._path)
            return
        for entry in os.scandir(self._path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)

    def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """Regular files below the folder, by name: without those that are not there or are reached over links."""
        found = {}
        left = self._size
        for name in (each for wanted in names for each in _matching(self._path, wanted)):
            content = _read(self._path, name, left)
            if content is not None:
                found[name] = content
                left -= len(content)
        return found

    def _state(self) -> list[tuple[int, ...]]:
        """The traces that changes leave: the kernel sets the times of change, and counts what is there."""
        system = os.statvfs(self._path)
        state: list[tuple[int, ...]] = [(system.f_bfree, system.f_ffree)]
        for name in ("", *self._files):
            try:
                found = os.lstat(os.path.join(self._path, name))
            except OSError:
                state.append(())
                continue
            state.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
        return state


def _executable(path: str, flags: int) -> int:
    return os.open(path, flags, 0o755)


def _matching(folder: str, name: str) -> list[str]:
    """The name itself, or of `sub/*` the names in a folder."""
    above, _, last = name.rpartition("/")
    if last != "*":
        return [name]
    descriptor = _opened(folder, above, _FOLDER)
    if descriptor is None:
        return []
    try:
        return [f"{above}/{each}" for each in sorted(os.listdir(descriptor))]
    finally:
        os.close(descriptor)


def _read(folder: str, name: str, most: int) -> bytes | None:
    descriptor = _opened(folder, name, _FILE)
    if descriptor is None:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def _opened(folder: str, name: str, kind: int) -> int | None:
    """Descriptor of what is below the folder without links; None if it is not there, or not of this kind."""
    descriptor = os.open(folder, _FOLDER)
    parts = name.split("/")
    for at, part in enumerate(parts, 1):
        try:
            below = os.open(part, kind if at == len(parts) else _FOLDER, dir_fd=descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor
