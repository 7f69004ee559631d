"""The memory of this process and of those that it has started.

A page of a mapped file, such as the learner's weights, counts as shared, in whichever process it is mapped. A process
has its anonymous memory (`RssAnon` in `/proc`) for itself.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import Any

import psutil

from rollmesh.mesh.runtime.memory_tuning import return_freed_memory
from rollmesh.mesh.runtime.process_memory import resident_memory


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of a tree of processes.

    Attributes:
        anonymous: resident, of these processes alone.
        shared: resident, in files and shared memory.
        device: that this process holds of its CUDA devices.
    """

    anonymous: int = 0
    shared: int = 0
    device: int = 0


def read_process_memory() -> ProcessMemory:
    """The memory of this process and of its descendants now; takes some milliseconds."""
    try:
        children = psutil.Process().children(recursive=True)
    except psutil.Error:
        children = []
    found = [resident_memory(pid) for pid in (None, *(child.pid for child in children))]
    shared = sum(one.files + one.shared for one in found)
    return ProcessMemory(sum(one.anonymous for one in found), shared, _device_bytes())


def release_unused_memory() -> None:
    """Returns memory that this process does not use, but keeps, to its devices and to the system."""
    gc.collect()
    if (cuda := _cuda_in_use()) is not None:
        cuda.empty_cache()
    return_freed_memory()


def _device_bytes() -> int:
    cuda = _cuda_in_use()
    return 0 if cuda is None else sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))


def _cuda_in_use() -> Any:
    """torch.cuda where this process uses it; another thread may be importing torch just now."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return cuda if is_initialized is not None and is_initialized() else None
