"""Keeps freed memory for the next message instead of handing it back to the kernel.

By default glibc returns every large block as soon as it is free, and its pages are cleared and mapped anew for the next
message or tensor: at payloads of 100 KB that was a third of a front's CPU.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3), from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# The largest block that the heap may serve (glibc's limit).
_BLOCK_BYTES = 32 << 20
# What processes that compute keep idle: room for the tensors of a step.
TENSOR_BYTES = 512 << 20


def keep_freed_memory(idle_bytes: int = 64 << 20) -> bool:
    """For this process; False where the C library is not glibc (nothing changes then).

    Args:
        idle_bytes: what may lie idle at the end of the heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, idle_bytes))
