"""Memory settings of long-lived processes: freed blocks are kept, and garbage is collected less often.

By default glibc returns every large block as soon as it is free. Its pages are cleared and mapped again for the next
message or tensor. At payloads of 100 KB that was a third of a front's CPU. By default Python searches for cycles after
every 700 new containers, and now and then in all modules. That was 3 to 5 % of every busy process, and a fifth of the
start of a generator.
"""

from __future__ import annotations

import ctypes
import gc

from rollmesh.mesh.runtime.fork_server.files import note_files

# Parameters of mallopt(3), from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# The largest block that the heap may serve (glibc's limit).
_BLOCK_BYTES = 32 << 20
_IDLE_BYTES = 64 << 20
# Idle bytes that processes that compute keep: enough for the tensors of a step.
TENSOR_BYTES = 512 << 20
# `keep_freed_memory` for a child process that is not Python, as its environment.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(_BLOCK_BYTES), "MALLOC_TRIM_THRESHOLD_": str(_IDLE_BYTES)}
# New containers before the youngest generation is searched, and how often each is before the next one is.
_THRESHOLDS = (20_000, 20, 20)


def keep_freed_memory(idle_bytes: int = _IDLE_BYTES) -> bool:
    """Keeps freed memory in this process; returns False without glibc, where nothing changes.

    Args:
        idle_bytes: what may lie idle at the end of the heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, idle_bytes))


def allocate_from_one_heap() -> None:
    """Has threads that come share one heap, so that `return_freed_memory` returns all that is free.

    Glibc gives busy threads heaps of their own, and keeps up to 64 MiB at the end of each. Without glibc nothing
    happens.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Returns freed memory to the system all the same; without glibc nothing happens."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def collect_garbage_seldom() -> None:
    """Collects garbage less often in a process that starts: new objects are searched in larger portions.

    Hardly anything of the modules that it loads is garbage, and nearly all of the garbage of messages dies without the
    collector.
    """
    gc.set_threshold(*_THRESHOLDS)


def freeze_heap() -> None:
    """Exempts present objects from garbage collection, once start-up is over: modules, models and tables stay for good.

    The collector ignores them from here on. Later objects are still searched for cycles
    (`collect_garbage_seldom`).
    """
    gc.collect()
    note_files()
    gc.freeze()
    collect_garbage_seldom()
