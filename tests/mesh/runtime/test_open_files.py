"""Files of a process that connections of all kinds take, and those that they leave."""

from __future__ import annotations

import resource

import pytest

from rollmesh.mesh.runtime import open_files
from rollmesh.mesh.runtime.open_files import MOST, ConnectionLimits, connections_here, limits_of


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (1 << 20, MOST),
        (16_384, MOST),
        (4096, ConnectionLimits(2048, 1024, 512)),
        (1024, ConnectionLimits(512, 256, 128)),
    ],
)
def test_files_are_left_for_other_things(files: int, expected: ConnectionLimits) -> None:
    assert limits_of(files) == expected
    assert sum(expected) <= files * 7 / 8


def test_a_process_raises_its_own_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connections_here() == limits_of(hard if hard != resource.RLIM_INFINITY else 2 * open_files.MOST.calls)
