"""Freed memory stays with a process that asked for it; cycles are still found where the heap is settled."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import resource
from rollmesh.mesh.runtime.memory_tuning import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
for _ in range(3):
    [bytes(256 << 10) for _ in range(32)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    [bytes(256 << 10) for _ in range(32)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_CYCLES = """
import weakref
from rollmesh.mesh.runtime.memory_tuning import freeze_heap
class Node:
    def __init__(self):
        self.me = self
freeze_heap()
first = weakref.ref(Node())
assert first() is not None
nodes = 1
while first() is not None and nodes < 1_000_000:
    Node()
    nodes += 1
print(nodes)
"""


def _printed(program: str) -> int:
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout)


def _page_faults(keep: bool) -> int:
    return _printed(_PROGRAM.format(keep=keep))


def test_large_blocks_are_not_mapped_anew() -> None:
    assert _page_faults(keep=True) * 10 < _page_faults(keep=False)


def test_a_settled_process_finds_its_cycles_in_larger_portions() -> None:
    assert 5_000 < _printed(_CYCLES) < 100_000
