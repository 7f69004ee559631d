"""The memory of this process and of those that it has started: what it is now, and its peak.

A page of a mapped file, such as the learner's weights, counts as shared, in whichever process it is mapped. A process
has its anonymous memory (`RssAnon` in `/proc`) for itself.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rollmesh.mesh.runtime.memory_tuning import return_freed_memory
from rollmesh.protos import generator_pb2

_KINDS = {"RssAnon:": "anonymous", "RssFile:": "shared", "RssShmem:": "shared"}


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

    @property
    def own(self) -> int:
        """Bytes of these processes alone."""
        return self.anonymous + self.device

    def max(self, other: ProcessMemory) -> ProcessMemory:
        """The larger of each."""
        return ProcessMemory(
            max(self.anonymous, other.anonymous), max(self.shared, other.shared), max(self.device, other.device)
        )

    def to_proto(self) -> generator_pb2.MemoryUse:
        """The message."""
        return generator_pb2.MemoryUse(rss_bytes=self.anonymous, shared_bytes=self.shared, device_bytes=self.device)


def read_process_memory() -> ProcessMemory:
    """The memory of this process and of its descendants now; takes some milliseconds."""
    try:
        children = psutil.Process().children(recursive=True)
    except psutil.Error:
        children = []
    found = {"anonymous": 0, "shared": 0}
    for pid in ("self", *(child.pid for child in children)):
        for kind, count in _resident(Path(f"/proc/{pid}/status")).items():
            found[kind] += count
    return ProcessMemory(found["anonymous"], found["shared"], _device_bytes())


def release_unused_memory() -> None:
    """Returns memory that this process does not use, but keeps, to its devices and to the system."""
    gc.collect()
    if (cuda := _cuda_in_use()) is not None:
        cuda.empty_cache()
    return_freed_memory()


def _resident(status: Path) -> dict[str, int]:
    found = dict.fromkeys(_KINDS.values(), 0)
    try:
        lines = status.read_text().splitlines()
    except OSError:
        # It has ended meanwhile.
        return found
    for line in lines:
        name, *rest = line.split()
        if name in _KINDS:
            found[_KINDS[name]] += int(rest[0]) * 1024
    return found


def _device_bytes() -> int:
    cuda = _cuda_in_use()
    return 0 if cuda is None else sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))


def _cuda_in_use() -> Any:
    """torch.cuda where this process uses it; another thread may be importing torch just now."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return cuda if is_initialized is not None and is_initialized() else None
