"""Numbers of processes over which sequences cannot be divided are refused."""

from __future__ import annotations

import pytest

from rollmesh.learner.engines.fsdp2.ulysses.division import check_division
from rollmesh.mesh.errors import ConfigError


def test_a_number_that_divides_heads_and_processes_is_taken():
    for parts in (1, 2, 4, 8):
        check_division(parts, heads=32, processes=8, name="model")


@pytest.mark.parametrize(
    ("parts", "heads", "processes", "named", "nearest"),
    [
        (4, 6, 8, "6 attention heads", 2),
        (8, 28, 8, "28 attention heads", 4),
        (4, 32, 6, "6 ranks", 2),
        (3, 8, 4, "8 attention heads", 4),
        (2, 32, 1, "1 ranks", 1),
    ],
)
def test_another_is_refused_with_the_nearest(parts, heads, processes, named, nearest):
    with pytest.raises(ConfigError, match=named) as refused:
        check_division(parts, heads=heads, processes=processes, name="model")
    assert refused.value.hint == f"set learner.parallel.sp: {nearest}, the nearest that divides both"
