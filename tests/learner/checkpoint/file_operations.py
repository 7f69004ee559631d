"""Operations on files, counted; a process is killed before one of them, or amid the bytes of a file."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


class FileOperations:
    """Counts what this process does to the files of a folder, from now on, whichever thread does it.

    A write is two operations, with half of its bytes on the disk between them.

    Args:
        folder: whose files count when they are opened.
        fatal: number of the operation before which the process kills itself, from 1 on.
        tell: is told its name then.
        every: of the writes of a file the first counts, and each so many later.
    """

    def __init__(self, folder: Path, fatal: int, tell: Callable[[str], None], *, every: int = 1) -> None:
        self._folder = str(folder)
        self._fatal = fatal
        self._tell = tell
        self._every = every
        self._numbers = itertools.count(1)
        sys.addaudithook(self._audit)
        self._sync, self._create_stream, self._write_text = os.fsync, FileSystem.create_stream, Path.write_text
        os.fsync = self._fsync
        FileSystem.create_stream = lambda *how: self._stream(*how)  # type: ignore[method-assign]
        Path.write_text = lambda *how, **more: self._text(*how, **more)  # type: ignore[method-assign]

    def count(self, name: str) -> None:
        """Counts an operation that is about to happen."""
        if next(self._numbers) == self._fatal:
            self._tell(name)
            os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES:
            self.count(f"{event} {os.path.basename(arguments[0])}")
        elif event == "open" and arguments[1] is not None and not isinstance(arguments[0], int):
            # Without a mode it is opened for `fsync` alone, which counts itself.
            path = os.fspath(arguments[0])
            if isinstance(path, str) and path.startswith(self._folder):
                self.count(f"open {os.path.basename(path)}")

    def _fsync(self, descriptor: int) -> None:
        self.count("fsync")
        self._sync(descriptor)

    @contextmanager
    def _stream(self, system: FileSystem, path: Path, mode: str) -> Iterator[Any]:
        with self._create_stream(system, path, mode) as stream:
            yield _Halves(stream, Path(path).name, self.count, self._every) if "w" in mode else stream

    def _text(self, path: Path, text: str, encoding: str) -> None:
        with path.open("wb") as file:
            _Halves(file, path.name, self.count, self._every).write(text.encode(encoding))


class _Halves:
    """A file that is written in halves."""

    def __init__(self, file: Any, name: str, count: Callable[[str], None], every: int) -> None:
        self._file = file
        self._name = name
        self._count = count
        self._every = every
        self._writes = 0

    def write(self, data: Any) -> int:
        self._writes += 1
        if (self._writes - 1) % self._every:
            return int(self._file.write(data))
        bytes_ = memoryview(data).cast("B")
        half = len(bytes_) // 2
        self._count(f"write {self._name}")
        self._file.write(bytes_[:half])
        self._file.flush()
        self._count(f"write on {self._name}")
        self._file.write(bytes_[half:])
        return len(bytes_)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
