"""System calls of Linux that Python has no function for. Sources: the man pages of section 2."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct

# Machine -> its number in the kernel's audit interface.
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINE = platform.machine()

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR, _AT_RECURSIVE, _AT_FDCWD = 442, 0x8000, -100
_CAPABILITY_VERSION_3 = 0x20080522
_WORD = struct.Struct("<I")

# The interpreter stays locked: a zygote has one thread.
_LIBC = ctypes.PyDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Makes a system call by number; `what` names it in the error.

    Raises:
        OSError: the kernel refuses.
    """
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_LIBC.syscall(ctypes.c_long(number), *words), what)


def _words(*arguments: int) -> tuple[ctypes.c_ulong, ...]:
    return tuple(ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:5])


def prctl(option: int, *arguments: int) -> int:
    """Operates on the calling process."""
    return _checked(_LIBC.prctl(*_words(option, *arguments)), f"prctl({option})")


# Arguments are made ready here where each job needs them: what a fork touches first is copied for it, page by page.
_DIE_WITH_PARENT = _words(PR_SET_PDEATHSIG, signal.SIGKILL)
_TAKE_ORPHANS = _words(PR_SET_CHILD_SUBREAPER, 1)
_NO_NEW_PRIVILEGES = _words(PR_SET_NO_NEW_PRIVS, 1)
_NO_CAPABILITIES = (
    ctypes.c_long(_CAPSET.get(MACHINE, -1)),
    ctypes.create_string_buffer(_CAPABILITY_VERSION_3.to_bytes(4, "little") + bytes(4), 8),
    ctypes.create_string_buffer(24),
)


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    _checked(_LIBC.prctl(*_DIE_WITH_PARENT), "prctl")


def take_orphans() -> None:
    """Makes processes whose parents end, below this one, its own children."""
    _checked(_LIBC.prctl(*_TAKE_ORPHANS), "prctl")


def refuse_privileges() -> None:
    """Executing a file gives this process, and all below it, nothing from now on."""
    _checked(_LIBC.prctl(*_NO_NEW_PRIVILEGES), "prctl")


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class Filter:
    """A seccomp filter, made ready so that a process has little to do before it installs it.

    Args:
        program: an array of `struct sock_filter`.
        placeholder: stands in it for the id of the process.
    """

    def __init__(self, program: bytes, placeholder: int) -> None:
        self._buffer = ctypes.create_string_buffer(program, len(program))
        self._ids = [at for at in range(4, len(program), 8) if program[at : at + 4] == _WORD.pack(placeholder)]
        descriptor = _FilterProgram(len(program) // 8, ctypes.cast(self._buffer, ctypes.c_char_p))
        self._arguments = _words(PR_SET_SECCOMP, 2, ctypes.addressof(descriptor))
        self._kept = descriptor

    def install(self) -> None:
        """Puts this process under the filter; needs `refuse_privileges` before."""
        pid = os.getpid()
        for at in self._ids:
            _WORD.pack_into(self._buffer, at, pid)
        _checked(_LIBC.prctl(*self._arguments), "seccomp")


def unshare(flags: int) -> None:
    """Moves the process, or its later children, to new namespaces."""
    _checked(_LIBC.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mounts a file system."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _checked(_LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def unmount(target: str, flags: int = MNT_DETACH) -> None:
    """Unmounts a file system; one that is in use vanishes with its last user."""
    _checked(_LIBC.umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Makes `new` the root, and mounts the former one at `old`."""
    syscall("pivot_root", _PIVOT_ROOT[MACHINE], os.fsencode(new), os.fsencode(old))


def make_read_only(path: str) -> None:
    """Makes a mount and all below it read-only, without set-user-id programs and without devices."""
    attributes = MS_RDONLY | MS_NOSUID | MS_NODEV
    wanted = ctypes.create_string_buffer(attributes.to_bytes(8, "little") + bytes(24), 32)
    syscall("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, wanted, 32)


def set_host_name(name: bytes) -> None:
    """Names this host within its namespace."""
    _checked(_LIBC.sethostname(name, ctypes.c_size_t(len(name))), "sethostname")


def drop_capabilities() -> None:
    """Gives up all capabilities of this process."""
    _checked(_LIBC.syscall(*_NO_CAPABILITIES), "capset")
