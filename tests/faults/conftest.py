"""Data of the meshes under faults, prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo_data import prepared, shared_folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The demonstration's, with a tiny model."""
    return prepared(shared_folder(tmp_path_factory, worker_id))
