"""The memory of one process, as Linux counts it: its own pages, those that others may share, and its peak.

Anonymous memory (`RssAnon`) is the process's own. A page of a mapped file or of shared memory counts in every process
that maps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Bytes of one process.

    Attributes:
        anonymous: pages that belong to no file.
        files: pages of mapped files.
        shared: pages of shared memory.
        peak: the largest sum of all so far.
    """

    anonymous: int = 0
    files: int = 0
    shared: int = 0
    peak: int = 0


def resident_memory(pid: int | None = None) -> ResidentMemory:
    """Memory of a process now; all zeros once it has ended. Without `/proc`, all of it counts as anonymous.

    Args:
        pid: of another process; None: this one.
    """
    found: dict[str, int] = {}
    try:
        text = Path(f"/proc/{'self' if pid is None else pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile", "RssShmem", "VmHWM"):
            found[name] = int(value.split()[0]) << 10
    if found:
        return ResidentMemory(*(found.get(name, 0) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")))
    try:
        resident = int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return ResidentMemory()
    return ResidentMemory(anonymous=resident, peak=resident)
