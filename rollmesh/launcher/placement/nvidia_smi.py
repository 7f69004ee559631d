"""CUDA devices as NVIDIA's driver counts them: their names and memory, and that of each process.

A call takes some tens of milliseconds. Where the driver does not say, the answer is empty.
"""

from __future__ import annotations

import subprocess
from collections import Counter

_TABLE = "--format=csv,noheader,nounits"
_DEADLINE_S = 10.0


def device_names() -> list[str]:
    """A line for each device: its number, model and identity."""
    return _ask("-L").splitlines()


def device_sizes() -> list[int]:
    """Bytes of each device."""
    return [int(line) << 20 for line in _ask("--query-gpu=memory.total", _TABLE).split() if line.isdecimal()]


def device_use() -> list[tuple[int, int]]:
    """Bytes in use and bytes in all, of each device."""
    lines = (line.split(",") for line in _ask("--query-gpu=memory.used,memory.total", _TABLE).splitlines())
    return [(int(used) << 20, int(size) << 20) for used, size in lines if used.strip().isdecimal()]


def overview() -> str:
    """The page of `nvidia-smi`: driver, its version of CUDA, devices, processes; empty without an answer."""
    return _ask()


def memory_by_process() -> dict[int, int]:
    """Bytes by process id, over all devices; contexts and libraries included."""
    return read_processes(_ask("--query-compute-apps=pid,used_memory", _TABLE))


def read_processes(text: str) -> dict[int, int]:
    """Reads lines of `pid, MiB`; those of other programs, whose memory is not told, are left out."""
    found: Counter[int] = Counter()
    for line in text.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdecimal() and used.strip().isdecimal():
            found[int(pid)] += int(used) << 20
    return dict(found)


def _ask(*query: str) -> str:
    try:
        command = ("nvidia-smi", *query)
        return subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
