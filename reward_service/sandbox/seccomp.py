"""Filters of system calls by allow list, as programs of classic BPF. Pure. Sources: seccomp(2), linux/filter.h.

A call that is not on the list fails with EPERM. A call of attackers alone ends the program (SIGSYS), and so does one
of another architecture or of x32. `clone3` fails with ENOSYS: its flags are out of a filter's sight, and C libraries
then use `clone`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from rollmesh.reward_service.sandbox.linux import AUDIT_ARCHITECTURES
from rollmesh.reward_service.sandbox.syscall_numbers import (
    ALLOWED,
    ATTACKS,
    CHILDREN,
    EXECUTES,
    JUDGED,
    OPTIONAL,
    UNSUPPORTED,
    WRITES,
    Table,
)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOTTY, _ENOSYS, _ENOTSUP = _ERRNO | 1, _ERRNO | 25, _ERRNO | 38, _ERRNO | 95
# Offsets in `struct seccomp_data`; lower halves of the arguments.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000
_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020080
# Options of `prctl`: the thread's name, whether the process can be dumped, a capability's presence, names of memory.
_PRCTL = (15, 16, 3, 23, 0x53564D41)
# The same of a process that is not confined yet: the signal at its parent's death, another filter.
_PREPARES = (1, 22)
# Requests of `ioctl`: the terminal's settings and size, bytes to read, close on exec and back, non-blocking.
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5451, 0x5450, 0x5421)
# Commands of `fcntl`: copies, flags, locks, size of a pipe, seals. Others send signals to a process of choice.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1034)
_AF_UNIX, _SOCKET_TYPE = 1, 0xF
# Streams and packets. A datagram may be sent to any socket of the host, whatever its own is connected to.
_CONNECTED = (1, 5)

Instruction = tuple[int, int, int, int]
# The first number of a region, and the answer to all of its numbers.
Region = tuple[int, list[Instruction]]
# Stands for the id of a process that is not known yet; no kernel gives it to one.
ANY_PROCESS = 0x7EA51DE5


@dataclass(frozen=True, slots=True)
class Profile:
    """System calls that a program needs.

    Attributes:
        writes: it writes to a folder of its own.
        children: it may have child processes, and signal what it sees.
        executes: it is executed, and may execute others.
        runtime: it is a runtime that asks for what it can do without.
        prepares: it is to be confined further before it runs anything of a model's.
    """

    writes: bool = False
    children: bool = False
    executes: bool = False
    runtime: bool = False
    prepares: bool = False


def filter_program(profile: Profile, machine: str, pid: int) -> bytes:
    """The filter of one process, an array of `struct sock_filter`.

    Args:
        profile: the calls it needs.
        machine: "x86_64" or "aarch64".
        pid: id of the process: without children it signals none but itself.
    """
    column = list(AUDIT_ARCHITECTURES).index(machine)
    answers: dict[int, list[Instruction]] = {}
    for table, result in (*_permitted(profile), (UNSUPPORTED, _ENOTSUP), (ATTACKS, _KILL)):
        answers.update({number: [_return(result)] for _, number in _numbers(table, column)})
    if profile.runtime:
        answers.update({number: [_return(_ENOSYS)] for _, number in _numbers(OPTIONAL, column)})
    for name, number in _numbers(JUDGED, column):
        if not (profile.children and name in CHILDREN):
            answers[number] = _judgement(name, profile, pid)
    if machine == "x86_64":
        answers[_X32] = [_return(_KILL)]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, AUDIT_ARCHITECTURES[machine]),
        _return(_KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_search(_regions(answers)),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _permitted(profile: Profile) -> list[tuple[Table, int]]:
    chosen = ((WRITES, profile.writes), (CHILDREN, profile.children), (EXECUTES, profile.executes))
    return [(ALLOWED, _ALLOW), *((table, _ALLOW) for table, wanted in chosen if wanted)]


def _regions(answers: dict[int, list[Instruction]]) -> list[Region]:
    """Regions of successive numbers with the same answer, from 0 on; the last has no end."""
    refusal = [_return(_EPERM)]
    regions: list[Region] = [(0, refusal)]
    for number, answer in sorted(answers.items()):
        if regions[-1][1] != answer:
            regions.append((number, answer))
        if number + 1 not in answers and number < _X32:
            regions.append((number + 1, refusal))
    return regions[1:] if regions[1][0] == 0 else regions


def _search(regions: list[Region]) -> list[Instruction]:
    """A binary search for the number's region: the kernel tries a filter on each number when it is installed."""
    if len(regions) == 1:
        return regions[0][1]
    middle = len(regions) // 2
    below, above = _search(regions[:middle]), _search(regions[middle:])
    return [(_AT_LEAST, len(below), 0, regions[middle][0]), *below, *above]


def _return(value: int) -> Instruction:
    return _RETURN, 0, 0, value


def _numbers(table: Table, column: int) -> Iterator[tuple[str, int]]:
    for name, numbers in table.items():
        number = numbers[column]
        if number is not None:
            yield name, number


def _judgement(name: str, profile: Profile, pid: int) -> list[Instruction]:
    """Instructions that decide over a call by its arguments, and always return."""
    if name == "clone3":
        return [_return(_ENOSYS)]
    if name == "clone":
        if profile.children:
            return [_argument(0), (_ANY_BIT, 0, 1, _CLONE_NAMESPACES), _return(_KILL), _return(_ALLOW)]
        new_thread = [_argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _return(_ALLOW)]
        return [_argument(0), (_ANY_BIT, 0, 1, _CLONE_NAMESPACES), _return(_KILL), *new_thread, _return(_EPERM)]
    if name == "fcntl":
        return _among(1, _FCNTL, _ALLOW, _EPERM)
    if name == "ioctl":
        return _among(1, _IOCTL, _ALLOW, _ENOTTY)
    if name == "prctl":
        return _among(0, _PRCTL + _PREPARES if profile.prepares else _PRCTL, _ALLOW, _EPERM)
    if name == "prlimit64":
        return _among(0, (0, pid), _ALLOW, _EPERM)
    if name == "socketpair":
        kind = [(_AND, 0, 0, _SOCKET_TYPE), *_among(1, _CONNECTED, _ALLOW, _EPERM)[1:]]
        return [_argument(0), (_EQUAL, 1, 0, _AF_UNIX), _return(_EPERM), _argument(1), *kind]
    return _among(0, (pid,), _ALLOW, _EPERM)


def _argument(index: int) -> Instruction:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * index


def _among(index: int, values: tuple[int, ...], then: int, otherwise: int) -> list[Instruction]:
    tests: list[Instruction] = [(_EQUAL, len(values) - 1 - at, 0, value) for at, value in enumerate(values)]
    # The last test jumps over the other result if it fails.
    tests[-1] = (_EQUAL, 0, 1, values[-1])
    return [_argument(index), *tests, _return(then), _return(otherwise)]
