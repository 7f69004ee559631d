"""Freed memory stays with a process that asked for it."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import resource
from mesh.heap import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
for _ in range(3):
    [bytes(256 << 10) for _ in range(32)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    [bytes(256 << 10) for _ in range(32)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _page_faults(keep: bool) -> int:
    program = [sys.executable, "-c", _PROGRAM.format(keep=keep)]
    return int(subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_large_blocks_are_not_mapped_anew() -> None:
    assert _page_faults(keep=True) * 10 < _page_faults(keep=False)
