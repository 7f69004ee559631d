"""The zygote: a warm Python process that forks programs.

Three processes stand between the owner and a program. The *stub* is the one that the owner starts and waits for: it
ends when all below it have ended. The *keeper* is the stub's child, and handles jobs. On rung 3 it is the first process
of its namespace: when it ends, the kernel ends all others there. The zygote is the keeper's child, and the programs
are the zygote's. It reads nothing of a job, so that no program finds anything of an earlier one in its memory.

Run by root, all of them become an ordinary user first: a root user is exempt from limits, on processes for example.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from array import array
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any, NoReturn

from rollmesh.reward_service.sandbox import keeper, landlock, limits, linux, messages, namespaces, program
from rollmesh.reward_service.sandbox.pressure import Pressure
from rollmesh.reward_service.sandbox.program import Confinement, filters
from rollmesh.reward_service.sandbox.python_program import open_streams

# The account that Linux keeps for no one.
ORDINARY_USER = 65534
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# In the namespace. The rules are for the outer folder: the inner one is a new file system for each job.
_BOX, _FOLDER = "/box", "/box/work"
# On rung 2 an account's other processes count as well; they come and go.
_SLACK = 256
# The stub, the keeper, the zygote.
_OURS = 3


def main() -> None:
    """Serves; the argument is the descriptor of the socket to the owner."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    # An interrupt at the owner's terminal is the owner's matter.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    received = messages.receive(connection)
    if received is None:
        return
    settings, _ = received
    with contextlib.suppress(OSError):  # where memory runs out, it is the programs that go
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        _attempt("an ordinary account for programs", _become_ordinary)
        if settings["rung"] > 2:
            _attempt("user and other namespaces", namespaces.enter)
    except _MissingError as missing:
        connection.sendall(messages.pack({"missing": str(missing)}))
        return
    linux.take_orphans()
    pid = os.fork()
    if pid:
        connection.close()
        _stay(pid, settings["folder"])
    try:
        _serve(connection, settings)
    except _MissingError as missing:
        connection.sendall(messages.pack({"missing": str(missing)}))
    except BaseException:  # noqa: BLE001  # a fork does not return into its parent's code
        traceback.print_exc()
    os._exit(0)


class _MissingError(Exception):
    """This host lacks something."""


def _attempt(what: str, step: Any, *arguments: Any) -> Any:
    try:
        return step(*arguments)
    except (OSError, ImportError) as error:
        raise _MissingError(f"{what}: {error}") from error


def _become_ordinary() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
        os.setresuid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
        # Else its files in /proc, which maps of accounts are written to, are root's.
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
    for folder in sys.path:
        if folder and os.path.isabs(folder) and not folder.endswith(".zip") and not os.access(folder, os.R_OK):
            raise _MissingError(f"account {os.geteuid()} cannot read {folder}, which Python programs import from")


def _stay(pid: int, folder: str) -> NoReturn:
    """The stub: waits for the keeper and for orphans, and kills the keeper when told to.

    It removes the folder itself, so that an owner that was killed leaves none.
    """
    signal.signal(signal.SIGTERM, lambda *_: _kill(pid))
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _serve(connection: socket.socket, settings: dict[str, Any]) -> None:
    linux.die_with_parent()
    for name in settings["preload"]:
        _attempt(f"module {name}", importlib.import_module, name)
    pressure = Pressure()  # of the host; on rung 3 its file is out of reach afterwards
    means = _prepare(settings)
    # Programs do not find this package; and what is done here is not done for each of them.
    for name in [name for name in sys.modules if name.partition(".")[0] == "rollmesh"]:
        del sys.modules[name]
    # The module `site`, which sets these, is not loaded.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    os.umask(0o022)
    gc.collect()
    gc.freeze()
    no_memory = mmap(-1, PAGESIZE)
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not os.fork():
        connection.close()
        ours.close()
        pressure.close()
        _fork_programs(theirs, means, no_memory)
    theirs.close()
    connection.sendall(messages.pack({"rung": means.rung, "landlock": means.landlock}))
    keeper.keep(connection, ours, means, no_memory, pressure)


def _fork_programs(orders: socket.socket, means: Confinement, no_memory: mmap) -> NoReturn:
    """The zygote: forks and reaps until the keeper has ended. It reads nothing of a job: each program is its fork."""
    linux.die_with_parent()
    linux.take_orphans()
    room = socket.CMSG_SPACE(keeper.MOST_DESCRIPTORS * 4)
    while True:
        order, received, _, _ = orders.recvmsg(keeper.ORDER.size, room, socket.MSG_CMSG_CLOEXEC)
        if not order:
            os._exit(0)
        last, pid = keeper.ORDER.unpack(order)
        descriptors = array("i", received[0][2]) if received else array("i")
        refusal = ""
        try:
            pid = pid or os.fork()
        except OSError as error:
            refusal = str(error)
        else:
            if not pid:
                program.start(means, no_memory, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if refusal:
            orders.send(refusal.encode())
        else:
            _await(orders, pid, kill_all=last and means.rung > 2)


def _await(orders: socket.socket, pid: int, *, kill_all: bool) -> None:
    """Tells the keeper of a process, and of its end once all that is to end has ended."""
    process = os.pidfd_open(pid)
    socket.send_fds(orders, [b"."], [process])
    os.close(process)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    # User and system time as RLIMIT_CPU counts it. Source: linux/posix-timers.h.
    ticked_s = time.clock_gettime(~pid << 3)
    _, status, usage = os.wait4(pid, 0)
    if kill_all:  # in this namespace: all but its first process, the keeper, and this one
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            while True:
                os.kill(-1, signal.SIGKILL)
                os.wait()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
    orders.send(keeper.ENDED.pack(status, ticked_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10))


def _prepare(settings: dict[str, Any]) -> Confinement:
    """Means of the rung that the settings name.

    Raises:
        _MissingError: this host lacks one of them.
    """
    abi, rung = landlock.version(), settings["rung"]
    ready = filters(rung, prepares=False), filters(rung, prepares=True), open_streams()
    readable = _apart([*_SYSTEM, *_imported(), *settings["readable"]])
    if settings["rung"] > 2:
        _attempt("mounts in a namespace", namespaces.build_root, settings["folder"], readable, _FOLDER)
        readable = _apart([path for path in readable if os.path.exists(path)])
        rules = [*_rules(readable, _DEVICES), (_BOX, landlock.READ | landlock.WRITE)]
        ruleset = _attempt("Landlock", landlock.ruleset, abi, rules) if abi else -1
        return Confinement(3, abi, ruleset, _OURS, _FOLDER, *ready)
    if abi < landlock.TRUNCATES:
        raise _MissingError(f"Landlock {landlock.TRUNCATES} (Linux 6.2): this kernel has {abi or 'none'}")
    rules = [*_rules(readable, _DEVICES), (settings["folder"], landlock.READ)]
    ruleset = _attempt("Landlock", landlock.ruleset, abi, rules)
    others = limits.tasks_of(os.geteuid()) + _SLACK
    return Confinement(2, abi, ruleset, others, settings["folder"], *ready)


def _imported() -> list[str]:
    """Folders that Python imports from, and those of its own library."""
    folders = [path for path in sys.path if os.path.isabs(path) and os.path.exists(path)]
    library = os.path.join(sys.base_prefix, "lib")
    shared = [os.path.join(library, name) for name in os.listdir(library) if name.startswith("libpython")]
    return [*folders, *(path for path in shared if os.path.isfile(path))]


def _apart(paths: list[str]) -> list[str]:
    """Those that exist, in order, without those below another."""
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.lexists(path)}):
        if not any(path.startswith(f"{above}/") for above in found if not os.path.islink(above)):
            found.append(path)
    return found


def _rules(readable: list[str], devices: tuple[str, ...]) -> list[tuple[str, int]]:
    readings = [(path, landlock.READ) for path in readable]
    return [*readings, *((path, landlock.READ | landlock.WRITE) for path in devices if os.path.exists(path))]
