"""Shared work of the Megatron engine's tests: its import, which is not done where tests are merely collected."""

from __future__ import annotations

import pytest

from rollmesh.mesh.runtime.memory_tuning import freeze_heap


@pytest.fixture(scope="session")
def megatron() -> None:
    """Megatron-Core for the CPU, in the test's own process."""
    pytest.importorskip("rollmesh.testing.imported_megatron", reason="megatron-core is not installed")
    # Engines search for garbage at their ends: not in all of its modules, each time.
    freeze_heap()
