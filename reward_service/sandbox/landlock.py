"""Landlock: a process gives up access to files, to TCP and to others outside its domain. Source: landlock(7)."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from rollmesh.reward_service.sandbox.linux import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
READ = _EXECUTE | _READ_FILE | _READ_DIR
# Regular files, folders, symbolic links; no devices, no sockets.
WRITE = _WRITE_FILE | _TRUNCATE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 12 | 1 << 13
# Version -> file rights that it knows, by their number.
_RIGHTS = {0: 0, 1: 13, 2: 14, 3: 15, 4: 15}
_ALL_RIGHTS = 16
_TCP = 0b11
_SOCKETS_AND_SIGNALS = 0b11
# Truncation can be refused; the net; signals.
TRUNCATES, NET, SCOPES = 3, 4, 6


def version() -> int:
    """The version of the kernel's interface; 0 where there is none."""
    try:
        return syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def ruleset(abi: int, rules: Iterable[tuple[str, int]]) -> int:
    """Descriptor of a ruleset that permits what `rules` name, as (path, rights below it), and refuses all else.

    Raises:
        OSError: a path cannot be opened, or the kernel refuses.
    """
    handled = (1 << _RIGHTS.get(abi, _ALL_RIGHTS)) - 1
    attributes = struct.pack("<QQQ", handled, _TCP if abi >= NET else 0, _SOCKETS_AND_SIGNALS if abi >= SCOPES else 0)
    size = 24 if abi >= SCOPES else 16 if abi >= NET else 8
    descriptor = syscall("landlock_create_ruleset", _CREATE_RULESET, _buffer(attributes), size, 0)
    for path, rights in rules:
        below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            permitted = rights & handled
            if not stat.S_ISDIR(os.fstat(below).st_mode):
                permitted &= _OF_FILES
            syscall("landlock_add_rule", _ADD_RULE, descriptor, _PATH_BENEATH, _rule(permitted, below), 0)
        finally:
            os.close(below)
    return descriptor


def restrict_self(descriptor: int) -> None:
    """Puts this process under a ruleset; needs `PR_SET_NO_NEW_PRIVS` before."""
    syscall("landlock_restrict_self", _RESTRICT_SELF, descriptor, 0)


def _rule(permitted: int, below: int) -> ctypes.Array[ctypes.c_char]:
    return _buffer(struct.pack("<Qi", permitted, below))


def _buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(data, len(data))
