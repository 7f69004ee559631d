"""Memory of CUDA devices by process, as NVIDIA's driver counts it: contexts and libraries included."""

from __future__ import annotations

import subprocess
from collections import Counter

_COMMAND = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_DEADLINE_S = 5.0


def device_memory() -> dict[int, int]:
    """Bytes by process id, over all devices; empty where the driver does not say. Takes some tens of milliseconds."""
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return read_table(done.stdout)


def read_table(text: str) -> dict[int, int]:
    """Reads lines of `pid, MiB`; those of other programs, whose memory is not told, are left out."""
    found: Counter[int] = Counter()
    for line in text.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdecimal() and used.strip().isdecimal():
            found[int(pid)] += int(used) << 20
    return dict(found)
