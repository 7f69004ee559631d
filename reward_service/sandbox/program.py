"""The program's own process, from its fork to the program's first instruction, and a Python program to its end."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import marshal
import os
import signal
import struct
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from types import CodeType, ModuleType
from typing import Any, NoReturn, cast

from rollmesh.reward_service.sandbox import landlock, limits, linux, seccomp

_LENGTH = struct.Struct("<Q")
# Bytes of code that a keeper holds.
_LARGEST_CODE = 16 << 20


@dataclass(frozen=True, slots=True)
class Confinement:
    """Means of confinement that a zygote has prepared.

    Attributes:
        rung: 2 or 3.
        landlock: version of the kernel's interface.
        ruleset: descriptor of the rules for files; -1 where the kernel has none.
        other_tasks: processes and threads that the account has besides the program's.
        folder: absolute path of the program's folder.
        filters: of system calls, for `seccomp.for_process`, by (may have children, is executed).
    """

    rung: int
    landlock: int
    ruleset: int
    other_tasks: int
    folder: str
    filters: dict[tuple[bool, bool], bytes]

    @staticmethod
    def filters_of(rung: int) -> dict[tuple[bool, bool], bytes]:
        """The filters of a rung: to make them takes too long for each job."""
        return {
            (children, executes): seccomp.filter_program(
                seccomp.Profile(writes=rung > 2, children=children, executes=executes),
                linux.MACHINE,
                seccomp.ANY_PROCESS,
            )
            for children in (False, True)
            for executes in (False, True)
        }


class CompiledCode:
    """A Python program's code, on its way from the first run, which compiles it, to the others.

    The process that compiles has executed nothing of the program yet. What it hands over is read as code by the
    confined processes of other runs alone; the keeper holds bytes.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._file = os.memfd_create("code", os.MFD_CLOEXEC) if wanted else -1
        self._bytes = b""

    @property
    def descriptor(self) -> int:
        """Where the code is put; -1 if it is there already, or not wanted."""
        return self._file

    def code(self, path: str) -> CodeType:
        """The code: an earlier run's, or compiled and handed over.

        Raises:
            OSError: the file cannot be read.
            SyntaxError: and others of `compile`.
        """
        if self._bytes:
            return cast(CodeType, marshal.loads(self._bytes))  # noqa: S302  # in its confinement
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        if self._file >= 0:
            text = marshal.dumps(code)
            # The length last: code that was not written to its end is none.
            with contextlib.suppress(OSError):
                if os.pwrite(self._file, text, _LENGTH.size) == len(text):
                    os.pwrite(self._file, _LENGTH.pack(len(text)), 0)
            os.close(self._file)
        return code

    def keep(self) -> None:
        """In the keeper, after a run: takes what it has handed over."""
        if self._file < 0:
            return
        (size,) = _LENGTH.unpack(os.pread(self._file, _LENGTH.size, 0) or bytes(_LENGTH.size))
        if 0 < size <= _LARGEST_CODE:
            self._bytes = os.pread(self._file, size, _LENGTH.size)
        if size:
            os.close(self._file)
            self._file = -1


def start(
    job: dict[str, Any],
    means: Confinement,
    streams: Sequence[int],
    failure: int,
    no_memory: mmap,
    compiled: CompiledCode,
) -> NoReturn:
    """Confines this process, a child of the keeper, and runs the program in it.

    Args:
        job: language, argv, and the fields of its limits.
        means: the zygote's.
        streams: descriptors that become standard input, output and error.
        failure: descriptor for the reason why the program cannot be run; closed before the program runs.
        no_memory: shared with the keeper; its first byte is set if Python runs out of memory.
        compiled: the Python program's code, or where to put it.
    """
    native = job["language"] != "python"
    try:
        _confine(job, means, streams, {failure, means.ruleset, compiled.descriptor}, native)
        if native:
            _execute(job["argv"])
    except BaseException as error:  # noqa: BLE001  # the keeper tells the owner
        os.write(failure, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)
    os.close(failure)
    os._exit(_run_python(job["argv"], means.folder, no_memory, compiled))


def _confine(job: dict[str, Any], means: Confinement, streams: Sequence[int], open_: set[int], native: bool) -> None:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    kept = sorted(open_ - {-1})
    for first, last in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(first + 1, last)
    os.chdir(means.folder)
    children = job["limits"]["processes"] > 1
    tasks = means.other_tasks + job["limits"]["processes"] + job["limits"]["threads"]
    limits.apply(job["limits"], tasks, job["limits"]["disk"])
    if native:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    linux.drop_capabilities()
    # The keeper is gone before this only if the zygote was ended, which ends this process too.
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if means.ruleset >= 0:
        landlock.restrict_self(means.ruleset)
        os.close(means.ruleset)
    linux.set_filter(seccomp.for_process(means.filters[children, native], os.getpid()))


def _execute(argv: Sequence[str]) -> NoReturn:
    os.execve(argv[0], list(argv), {})  # noqa: S606  # the program, in its confinement


def _run_python(argv: Sequence[str], folder: str, no_memory: mmap, compiled: CompiledCode) -> int:
    """Runs a file as `python FILE` does; returns its exit code."""
    sys.argv[:] = argv
    sys.path.insert(0, folder)
    sys.stdin = _stream(0, "r", "surrogateescape")
    sys.stdout = _stream(1, "w", "surrogateescape")
    sys.stderr = _stream(2, "w", "backslashreplace", buffering=1)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=argv[0], __builtins__=builtins)
    sys.modules["__main__"] = main
    code = _exit_code(argv[0], main, no_memory, compiled)
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


def _stream(number: int, mode: str, errors: str, buffering: int = -1) -> Any:
    return open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)


def _exit_code(path: str, main: ModuleType, no_memory: mmap, compiled: CompiledCode) -> int:
    try:
        exec(compiled.code(path), main.__dict__)  # noqa: S102  # what this process is for
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)  # noqa: T201  # its own standard error
        return 1
    except MemoryError:
        no_memory[0] = 1
        return 1
    except BaseException:  # noqa: BLE001  # as any Python program ends over it
        with contextlib.suppress(Exception):
            traceback.print_exc()
        return 1
    return 0
