"""A Python program in the process that runs it, from its preparation to its exit code."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from mmap import mmap
from types import CodeType, ModuleType
from typing import Any


class PythonProgram:
    """A program that is compiled, and ready to be run as `python FILE` does: once, in this process or a fork of it.

    Args:
        argv: the file, and its arguments.
        folder: absolute path of the program's folder, where this process is.
        no_memory: its first byte is set if Python runs out of memory.
        streams: see `open_streams`.
    """

    def __init__(self, argv: Sequence[str], folder: str, no_memory: mmap, streams: Sequence[Any]) -> None:
        sys.argv[:] = argv
        sys.path.insert(0, folder)
        sys.stdin, sys.stdout, sys.stderr = streams
        self._main = ModuleType("__main__")
        self._main.__dict__.update(__file__=argv[0], __builtins__=builtins)
        sys.modules["__main__"] = self._main
        self._no_memory = no_memory
        self._code = _compiled(argv[0])

    def run(self) -> int:
        """Runs it to its end; returns its exit code."""
        code = self._execute()
        with contextlib.suppress(Exception):  # as at the end of any Python program
            if (threading := sys.modules.get("threading")) is not None:
                threading._shutdown()
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):  # the program has closed or replaced it
                code = code or 120
        return code

    def _execute(self) -> int:
        try:
            if isinstance(self._code, BaseException):
                raise self._code
            exec(self._code, self._main.__dict__)  # noqa: S102  # what this process is for
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return (end.code or 0) & 0xFF
            print(end.code, file=sys.stderr)  # noqa: T201  # its own standard error
            return 1
        except MemoryError:
            self._no_memory[0] = 1
            return 1
        except BaseException:  # noqa: BLE001  # as any Python program ends over it
            with contextlib.suppress(Exception):
                traceback.print_exc()
            return 1
        return 0


def open_streams() -> list[Any]:
    """Standard input, output and error of a program, opened once for all forks: descriptors are theirs, not the files.

    A stream remembers of which kind its file is, so it is opened on a file of that kind.
    """
    kept = [os.dup(number) for number in range(3)]
    given = os.memfd_create("stdin")
    reader, writer = os.pipe()
    for number, descriptor in enumerate((given, writer, writer)):
        os.dup2(descriptor, number)
    opened = [
        _stream(0, "r", "surrogateescape"),
        _stream(1, "w", "surrogateescape"),
        _stream(2, "w", "backslashreplace", buffering=1),
    ]
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, number)
    for descriptor in (*kept, given, reader, writer):
        os.close(descriptor)
    return opened


def _compiled(path: str) -> CodeType | BaseException:
    """The code, or the error with which each run ends."""
    try:
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    except Exception as error:  # noqa: BLE001  # the program's
        return error


def _stream(number: int, mode: str, errors: str, buffering: int = -1) -> Any:
    return open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)
