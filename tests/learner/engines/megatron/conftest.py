"""Shared work of the Megatron engine's tests: its import, which is not done where tests are merely collected."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def megatron() -> None:
    """Megatron-Core for the CPU, in the test's own process."""
    pytest.importorskip("rollmesh.testing.imported_megatron", reason="megatron-core is not installed")
