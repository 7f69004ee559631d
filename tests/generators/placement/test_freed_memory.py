"""The memory that a sleep gives back, in this process and in others that the engine has started."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.generators.engines.process_memory import ProcessMemory, read_process_memory
from rollmesh.generators.placement.turn_actions import freed_bytes

AWAKE = ProcessMemory(anonymous=50, shared=7, device=30)


@pytest.mark.parametrize(
    ("awake", "asleep", "on_device", "freed"),
    [
        (AWAKE, ProcessMemory(20, 7, 30), 0, 30),
        # The device of an engine in this process is read from here too.
        (AWAKE, ProcessMemory(45, 7, 2), 25, 33),
        # The devices of other processes are known to the engine alone.
        (ProcessMemory(50), ProcessMemory(45), 1000, 1005),
        (ProcessMemory(50), ProcessMemory(60), 1000, 990),
        (ProcessMemory(50), ProcessMemory(60), 0, 0),
    ],
)
def test_no_byte_counts_twice_and_those_of_other_processes_count(
    awake: ProcessMemory, asleep: ProcessMemory, on_device: int, freed: int
) -> None:
    assert freed_bytes(awake, asleep, on_device) == freed


def test_memory_that_is_written_to_counts_as_this_process_own() -> None:
    before = read_process_memory()
    area = np.ones(64 << 20, np.uint8)
    assert read_process_memory().anonymous - before.anonymous > area.nbytes // 2
