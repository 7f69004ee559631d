"""Memory that is not there is an error of the transfer, not the end of the generator."""

from __future__ import annotations

import mmap

import pytest

from rollmesh.generators.weights.host_memory import allocate
from rollmesh.mesh.errors import WeightsError


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 70])
def test_too_much_is_an_error_of_the_transfer(nbytes: int) -> None:
    with pytest.raises(WeightsError, match=f"no memory for {nbytes} bytes"):
        allocate(nbytes)


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("rollmesh.generators.weights.host_memory.mmap.mmap", Plain)
    assert bytes(allocate(5000)) == bytes(5000)
