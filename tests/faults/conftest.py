"""Data of the meshes under faults, prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.world import prepare_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration's, with a tiny model."""
    return prepare_data(tmp_path_factory.mktemp("demo") / "data")
