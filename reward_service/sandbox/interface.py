"""Jobs for an executor, and how they ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, Protocol

End = Literal["exit", "signal", "cpu", "wall", "memory", "output", "denied", "infrastructure"]
Cause = Literal["", "cpu", "wall", "memory", "output"]
# Standard streams, and a few that a runtime opens.
_FEWEST_FILES = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one execution.

    Attributes:
        cpu_s: seconds of CPU time per process, rounded up to whole ones.
        wall_s: seconds from the program's start to its end.
        memory: bytes of address space per process; with `reserved`, bytes of its own memory that can be written. Where
            a cgroup bounds memory, all processes together have no more.
        output: bytes of standard output and standard error together.
        processes: processes at once; more than one needs rung 3 and a kernel that scopes signals (Landlock 6).
        threads: threads that these processes may have in addition.
        disk: bytes that the program may write to its folder, on rung 3; rung 2 writes nothing.
        files: open descriptors per process.
        reserved: bytes of address space that a runtime such as Node or the JVM reserves and does not use. Calls of
            attackers that such runtimes try as well then fail, and do not end the program.
    """

    cpu_s: float = 4.0
    wall_s: float = 8.0
    memory: int = 512 << 20
    output: int = 1 << 20
    processes: int = 1
    threads: int = 16
    disk: int = 64 << 20
    files: int = 64
    reserved: int = 0

    def __post_init__(self) -> None:
        if not (self.cpu_s > 0 and self.wall_s > 0):
            raise ValueError(f"a program needs time: cpu_s {self.cpu_s}, wall_s {self.wall_s}")
        if min(self.memory, self.output, self.processes, self.disk) < 1 or self.threads < 0:
            raise ValueError(f"limits are positive numbers: {self}")
        if self.files < _FEWEST_FILES:
            raise ValueError(f"no program runs with {self.files} open files; {_FEWEST_FILES} are the least")


@dataclass(frozen=True, slots=True)
class Job:
    """One execution of one program.

    Attributes:
        language: "python" (a file is run), "native" (a program is executed), or another that the executor knows.
        files: contents by path, relative to the folder in which the program runs. Each may be executed.
        argv: the program's path, and its arguments; the file among `files`, unless the language is "native".
        stdin: bytes of standard input, for `Executor.run`.
        limits: bounds of each execution.
        deadline: moment of `time.monotonic()` at which the caller waits no longer.
        outputs: files that the program makes and the caller wants, on rung 3 and above. They are paths below the
            folder; `sub/*` are all files of the folder `sub`.
        environment: variables of a native program; else there are none.
    """

    language: str
    files: Mapping[str, bytes]
    argv: Sequence[str]
    stdin: bytes = b""
    limits: Limits = field(default_factory=Limits)
    deadline: float = float("inf")
    outputs: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.argv or any("\0" in argument for argument in self.argv):
            raise ValueError("a job names its program, and no argument holds a zero byte")
        if self.language != "native" and self.argv[0] not in self.files:
            raise ValueError(f"{self.argv[0]!r} is not among the job's files")
        for name in (*self.files, *self.outputs):
            path = PurePosixPath(name)
            if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
                raise ValueError(f"a file's path stays below the program's folder: {name!r}")


@dataclass(frozen=True, slots=True)
class Ran:
    """End of a job.

    Attributes:
        end: how it ended. `infrastructure`: the program did not run, or not to its end, for a reason that is not its
            own. Such a job may be tried again. All else is the program's doing. `denied`: it made a call of attackers.
        code: exit code; for any other end the signal's number, or 0 if the program did not run.
        stdout: standard output, cut at the limit.
        stderr: standard error, cut at the limit.
        cpu_s: seconds of CPU time of the program and of the children that it has waited for.
        peak: largest resident memory of one process, bytes.
        stalled_s: seconds of its time in which something on the host waited for a processor. None: it is not known, or
            the program was not ended for its time.
        files: those of `Job.outputs` that the program has made, together at most `Limits.disk` bytes. A link is none.
        reason: cause of an end that is `infrastructure`, for people.
    """

    end: End
    code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    cpu_s: float = 0.0
    peak: int = 0
    stalled_s: float | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    reason: str = ""


class Executor(Protocol):
    """Runs jobs.

    Attributes:
        rung: level of isolation.
        missing: reason why a higher one is not in force; empty if none is known.
        languages: values of `Job.language` that it takes.
    """

    rung: int
    missing: str
    languages: frozenset[str]

    async def run_all(
        self, job: Job, inputs: Sequence[bytes], *, stop: Callable[[Ran], bool] | None = None
    ) -> list[Ran]:
        """Runs a job's program once for each standard input, in order, each time in a process and folder of its own.

        The files are laid out once, and a Python program is compiled once. One run follows the other, all of them
        before the job's deadline.

        Args:
            job: the program; its own `stdin` is not used.
            inputs: bytes of standard input of each run.
            stop: called with each end; after one for which it is true, no other input is run.

        Returns:
            the ends of the first inputs: of all, unless `stop` was true. Nothing is raised for what programs or the
            infrastructure do: where runs are impossible, their ends are `infrastructure`.

        Raises:
            UnavailableError: this executor cannot run such a job at all.
        """
        ...

    async def run(self, job: Job) -> Ran:
        """`run_all` with the job's own `stdin` alone."""
        ...

    async def close(self) -> None:
        """Ends what this executor has started."""
        ...

    def describe(self) -> str:
        """The isolation in force, in one line for people."""
        ...


def ended(cause: Cause, exit_code: int, *, out_of_memory: bool = False) -> tuple[End, int]:
    """The end of a program and its code, from what was seen of it.

    Args:
        cause: limit over which it, or a process that it has started, was killed; empty if none is known.
        exit_code: exit code, or a signal's negative number.
        out_of_memory: the program has ended over a `MemoryError`.
    """
    if cause:
        return cause, max(0, -exit_code)
    if exit_code >= 0:
        return ("memory" if out_of_memory and exit_code else "exit"), exit_code
    number = -exit_code
    if number == _SIGSYS:
        return "denied", number
    return "signal", number


# The number on Linux, so that this module can be read anywhere.
_SIGSYS = 31
