"""The memory of this host: what is free of it, and which folders take it."""

from __future__ import annotations

from pathlib import Path

import psutil

# Limit and use of a container's memory, and what of that is files that can be dropped: control groups 2 and 1.
_GROUP = Path("/sys/fs/cgroup")
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
# File systems whose files are memory.
_MEMORY = ("tmpfs", "ramfs")


def free_host_bytes() -> int:
    """Free memory of this host, or of the container if that is less; in bytes."""
    free = int(psutil.virtual_memory().available)
    for limit, used, cached in _GROUPS:
        try:
            most, now = int((_GROUP / limit).read_text()), int((_GROUP / used).read_text())
            stat = dict(line.split() for line in (_GROUP / used).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            # No such group, or one without a limit ("max").
            continue
        free = min(free, max(0, most - now + int(stat.get(cached, 0))))
    return free


def is_in_memory(folder: Path) -> bool:
    """True if files in a folder, perhaps one that is still to be made, take memory instead of room on a disk."""
    mounted = {Path(found.mountpoint): found.fstype for found in psutil.disk_partitions(all=True)}
    real = folder.resolve()
    return next((mounted[place] for place in (real, *real.parents) if place in mounted), "") in _MEMORY
