"""Filters of system calls, run by an interpreter of their instructions, for both machines."""

from __future__ import annotations

import struct

import pytest

from rollmesh.reward_service.sandbox.linux import AUDIT_ARCHITECTURES
from rollmesh.reward_service.sandbox.seccomp import Profile, filter_program
from rollmesh.reward_service.sandbox.syscall_numbers import ALLOWED, ATTACKS, JUDGED

ALLOW, KILL, EPERM, ENOTTY, ENOSYS, ENOTSUP = 0x7FFF0000, 0x80000000, 0x50001, 0x50019, 0x50026, 0x5005F
PID = 4321
THREAD, PROCESS, USER_NAMESPACE = 0x3D0F00, 0x1200011, 0x10000011
#: (x86_64, aarch64)
CLONE, CLONE3, KILLS, PRCTL, FCNTL, IOCTL, EXECVE, MKDIRAT, OPENAT, SOCKET, PTRACE, TGKILL, PRLIMIT, PAIR, XATTR = (
    *((56, 220), (435, 435), (62, 129), (157, 167), (72, 25), (16, 29), (59, 221)),
    *((258, 34), (257, 56), (41, 198), (101, 117), (234, 131), (302, 261), (53, 199), (194, 11)),
)


def _result(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """The filter's answer to a call."""
    words = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, AUDIT_ARCHITECTURES[machine], 0, *words)
    at = accumulator = 0
    while True:
        code, yes, no, value = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
            continue
        if code == 0x54:
            accumulator &= value
            continue
        holds = {
            0x15: accumulator == value,
            0x35: accumulator >= value,
            0x45: bool(accumulator & value),
        }[code]
        at += yes if holds else no


@pytest.mark.parametrize("column", [0, 1], ids=list(AUDIT_ARCHITECTURES))
def test_calls_are_judged_by_number_and_arguments(column: int) -> None:
    machine = list(AUDIT_ARCHITECTURES)[column]

    def judged(call: tuple[int, int], *arguments: int, **profile: bool) -> int:
        return _result(filter_program(Profile(**profile), machine, PID), machine, call[column], *arguments)

    assert judged(OPENAT) == ALLOW
    assert [judged(SOCKET), judged(PTRACE), judged(CLONE3), judged((9999, 9999))] == [EPERM, KILL, ENOSYS, EPERM]
    assert [judged(CLONE, flags) for flags in (THREAD, PROCESS, USER_NAMESPACE)] == [ALLOW, EPERM, KILL]
    assert [judged(CLONE, flags, children=True) for flags in (THREAD, PROCESS, USER_NAMESPACE)] == [ALLOW, ALLOW, KILL]
    assert [judged(KILLS, pid) for pid in (PID, PID + 1, 0, 0xFFFFFFFF)] == [ALLOW, EPERM, EPERM, EPERM]
    assert [judged(TGKILL, pid) for pid in (PID, 1)] == [ALLOW, EPERM]
    assert judged(KILLS, 1, children=True) == ALLOW
    assert [judged(PRLIMIT, pid) for pid in (0, PID, 1)] == [ALLOW, ALLOW, EPERM]
    assert [judged(PRCTL, option) for option in (15, 22, 1, 38)] == [ALLOW, EPERM, EPERM, EPERM]
    assert [judged(FCNTL, 0, command) for command in (1, 3, 8, 10, 15, 1030)] == [
        ALLOW,
        ALLOW,
        EPERM,
        EPERM,
        EPERM,
        ALLOW,
    ]
    assert [judged(IOCTL, 1, request) for request in (0x5401, 0x5412, 0x5421)] == [ALLOW, ENOTTY, ALLOW]
    pairs = [(1, 1), (1, 0x80805), (1, 2), (1, 3), (1, 0x80802), (2, 1), (30, 1)]
    assert [judged(PAIR, *pair) for pair in pairs] == [ALLOW, ALLOW, EPERM, EPERM, EPERM, EPERM, EPERM]
    assert judged(XATTR) == ENOTSUP
    assert [judged(EXECVE), judged(EXECVE, executes=True)] == [EPERM, ALLOW]
    assert [judged(MKDIRAT), judged(MKDIRAT, writes=True)] == [EPERM, ALLOW]


def test_other_architectures_are_ended() -> None:
    program = filter_program(Profile(children=True, writes=True, executes=True), "x86_64", PID)
    assert _result(program, "aarch64", OPENAT[0]) == KILL
    assert _result(program, "x86_64", 0x40000000 | 39) == KILL
    assert _result(filter_program(Profile(), "aarch64", PID), "x86_64", OPENAT[1]) == KILL


def test_each_number_has_the_answer_of_its_table() -> None:
    for column, machine in enumerate(AUDIT_ARCHITECTURES):
        program = filter_program(Profile(), machine, PID)
        permitted = {numbers[column] for numbers in ALLOWED.values()}
        judged = {numbers[column] for numbers in JUDGED.values()}
        killed = {numbers[column] for numbers in ATTACKS.values()}
        for number in set(range(600)) - judged:
            result = _result(program, machine, number)
            assert (result == ALLOW) == (number in permitted), number
            assert (result == KILL) == (number in killed), number
