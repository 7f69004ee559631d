"""The process of a run, from its fork to the program's first instruction.

A run that others follow leaves a *successor*. It is a fork of its process, which by then is confined and has compiled
the program, and has executed nothing of it. The successor waits for the next run's streams, and leaves one in turn. So
these steps are taken once per job, and no run finds anything of an earlier one.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from mmap import mmap
from typing import Any, NoReturn

from rollmesh.reward_service.sandbox import landlock, limits, linux, seccomp
from rollmesh.reward_service.sandbox.python_program import PythonProgram

# Orders to a successor: the run is the last one, or others follow.
LAST, FOLLOWED = b".", b"+"
# Standard input, output and error, and the descriptor for failures, as they travel; an id of a process.
_FOUR, _ID = struct.Struct("4i"), struct.Struct("i")
# See `seccomp.Profile`: `children`, `executes`, `runtime`.
Kind = tuple[bool, bool, bool]
_MOST_DESCRIPTORS = os.sysconf("SC_OPEN_MAX")


@dataclass(frozen=True, slots=True)
class Confinement:
    """Means of confinement that a zygote has prepared.

    Attributes:
        rung: 2 or 3.
        landlock: version of the kernel's interface.
        ruleset: descriptor of the rules for files; -1 where the kernel has none.
        other_tasks: processes and threads that the account has besides the program's.
        folder: absolute path of the program's folder.
        filters: of system calls, by kind of job: to make them takes too long for each.
        preparing: the same for a process that leaves successors and runs nothing yet.
        streams: those of a Python program, open.
    """

    rung: int
    landlock: int
    ruleset: int
    other_tasks: int
    folder: str
    filters: dict[Kind, linux.Filter]
    preparing: dict[Kind, linux.Filter]
    streams: Sequence[Any]


def kind_of(job: dict[str, Any]) -> Kind:
    """The kind of a job's program."""
    limits = job["limits"]
    executes = job["language"] == "native"
    return limits["processes"] > 1, executes, executes and limits["reserved"] > 0


def filters(rung: int, *, prepares: bool) -> dict[Kind, linux.Filter]:
    """All filters of a rung."""
    found = {}
    for children, (executes, runtime) in product((False, True), ((False, False), (True, False), (True, True))):
        profile = seccomp.Profile(rung > 2, children or prepares, executes, runtime, prepares)
        program = seccomp.filter_program(profile, linux.MACHINE, seccomp.ANY_PROCESS)
        found[children, executes, runtime] = linux.Filter(program, seccomp.ANY_PROCESS)
    return found


def start(means: Confinement, no_memory: mmap, descriptors: Sequence[int]) -> NoReturn:
    """Confines this process, a fork of the zygote, and runs the program in it.

    Args:
        means: the zygote's.
        no_memory: shared with the keeper; its first byte is set if Python runs out of memory.
        descriptors: of the job, of the three standard streams, and for the reason why the program cannot be run, which
            is closed before it runs. If a run follows, another is for orders to successors.
    """
    given, *streams, failure = descriptors[:5]
    python = None
    try:
        orders = socket.socket(fileno=descriptors[5]) if len(descriptors) > 5 else None
        job = marshal.loads(os.pread(given, os.fstat(given).st_size, 0))  # noqa: S302  # the keeper's
        native, kind = job["language"] != "python", kind_of(job)
        kept = {failure, means.ruleset, -1 if orders is None else orders.fileno()}
        _confine(job, means, streams, kept - {-1}, native=native)
        if orders is not None:
            means.preparing[kind].install()
        if not native:
            python = PythonProgram(job["argv"], means.folder, no_memory, means.streams)
        confined = means.filters[kind]
        if orders is not None:
            failure = _leave_successor(orders, means.folder, failure)
        # The zygote is gone before this only if its owner has ended all.
        linux.die_with_parent()
        confined.install()
        if python is None:
            os.execve(job["argv"][0], job["argv"], job["environment"])  # noqa: S606  # the program, in its confinement
    except BaseException as error:  # noqa: BLE001  # the keeper tells the owner
        os.write(failure, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)
    os.close(failure)
    os._exit(python.run())


def _confine(job: dict[str, Any], means: Confinement, streams: Sequence[int], kept: set[int], *, native: bool) -> None:
    """All means that a process and its forks have in common."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, _MOST_DESCRIPTORS)
    os.chdir(means.folder)
    # The successor is one more.
    tasks = means.other_tasks + job["limits"]["processes"] + job["limits"]["threads"] + 1
    limits.apply(job["limits"], tasks, job["limits"]["disk"])
    if native:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    linux.drop_capabilities()
    linux.refuse_privileges()
    if means.ruleset >= 0:
        landlock.restrict_self(means.ruleset)
        os.close(means.ruleset)


def _leave_successor(orders: socket.socket, folder: str, failure: int) -> int:
    """Returns in each process that is to run the program, with its descriptor for failures.

    Written for few instructions: what a fork touches first is copied for it, page by page.
    """
    room = socket.CMSG_SPACE(_FOUR.size)
    while not os.fork():
        os.close(failure)
        for number in (0, 1, 2):  # the streams of the run that goes before
            os.close(number)
        orders.send(_ID.pack(os.getpid()))
        order, descriptors, _, _ = orders.recvmsg(1, room)
        if not descriptors:  # the keeper has ended
            os._exit(0)
        # Each gets the lowest number that is free: the streams their own.
        failure = _FOUR.unpack(descriptors[0][2])[3]
        os.set_inheritable(failure, False)  # a program that is executed has none of it
        os.chdir(folder)  # which may be another since the last run
        if order == LAST:
            break
    orders.close()
    return failure
