"""`python -m tests.mesh.runtime.forked_probe`: reports everything that a process knows about itself, in JSON on stdout.

Arguments choose how it ends: `exit N`, `status N`, `raise`, `text`, `interrupt`, each with a file that it writes to and
never closes; `wait`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import types
import uuid
from pathlib import Path
from typing import Any

from rollmesh.mesh.runtime.memory_tuning import freeze_heap

PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_GET_CHILD_SUBREAPER = 2, 3, 37


def _prctl(option: int) -> int:
    value, libc = ctypes.c_int(), ctypes.CDLL(None)
    returned = libc.prctl(option, ctypes.byref(value))
    return int(returned) if option == PR_GET_DUMPABLE else value.value


def _openmp_threads() -> int:
    """Threads of a parallel region that the calling thread would begin."""
    import torch

    torch.get_num_threads()  # a thread takes the number when it first asks, or computes
    [path, *_] = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line)
    return int(ctypes.CDLL(path).omp_get_max_threads())


def _threads_of_torch() -> list[int]:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    found = [torch.get_num_threads(), torch.get_num_interop_threads(), _openmp_threads()]
    other = threading.Thread(target=lambda: found.append(_openmp_threads()))
    other.start()
    other.join()
    return found


def _child(queue: Any) -> None:
    queue.put([__name__, sys.argv[1:], os.getppid()])


def _spawned() -> Any:
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    name, arguments, parent = queue.get()
    process.join()
    return [name, arguments, parent == os.getpid(), process.exitcode]


def same() -> dict[str, Any]:
    """All in which an executed process and a forked one are alike."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = ("Umask", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp", "CapEff", "Threads", "Cpus_allowed")
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return {
        "status": {name: status[name] for name in names},
        "comm": Path("/proc/self/comm").read_text(),
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(),
        "arguments": [sys.argv[1:], Path(sys.argv[0]).name, sys.orig_argv[1:], sys.executable],
        "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "folder": str(Path.cwd()),
        "parent": os.getppid(),
        "files": {name: os.readlink(f"/proc/self/fd/{name}") for name in ("0", "1", "2")},
        "open": [name for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").exists()],
        "limits": {name: resource.getrlimit(vars(resource)[name]) for name in dir(resource) if "RLIMIT_" in name},
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "prctl": [*map(_prctl, (PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_GET_CHILD_SUBREAPER))],
        "handlers": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
        "streams": [[one.encoding, one.errors, one.line_buffering, one.write_through] for one in streams],
        "environment": dict(os.environ),
        "path": sys.path,
        "flags": repr(sys.flags),
        "main": [__name__, __spec__.name, sys.modules["__main__"].__dict__ is globals()],
        "logging": [len(logging.getLogger().handlers), logging.getLogger().level],
        "collector": [gc.isenabled(), gc.get_threshold()],
        "main thread": threading.current_thread() is threading.main_thread(),
        "torch": _threads_of_torch(),
        "spawned": _spawned(),
    }


def own() -> dict[str, Any]:
    """All that no two processes share."""
    import numpy as np

    from rollmesh.generators.openai_server.conversations.prefix_index import totals
    from rollmesh.reward_service.judge.templates import _boundary

    return {
        "pid": os.getpid(),
        "random": random.random(),
        "numpy": float(np.random.rand()),
        "uuid": str(uuid.uuid4()),
        "prefix": int(totals([1])[-1]),
        "boundary": _boundary({}),
        "key": bytes(multiprocessing.current_process().authkey).hex(),
    }


def _write_unflushed(path: str) -> None:
    """Writes to a file that a module keeps open to the end."""
    module = types.ModuleType("keeps_a_file")
    module.file = open(path, "w")  # type: ignore[attr-defined]  # noqa: SIM115
    module.file.write("kept")
    sys.modules[module.__name__] = module


def main() -> None:
    how, *rest = sys.argv[1:]
    if how == "wait":
        print(os.getpid(), flush=True)
        time.sleep(3600)
    _write_unflushed(rest.pop())
    print(json.dumps({"same": same(), "own": own()} if how == "exit" else how))
    atexit.register(print, "at the end")
    threading.Thread(target=lambda: (time.sleep(0.1), print("a thread ends"))).start()
    if how in ("exit", "status"):
        sys.exit(int(rest[0]))
    if how == "text":
        freeze_heap()  # as services do
        sys.exit("a text")
    if how == "raise":
        raise RuntimeError("raised")
    if how == "interrupt":
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
