"""The worlds of engines, for tests on several ranks."""

from __future__ import annotations

from rollmesh.testing.fixtures import engine_worlds  # noqa: F401 - a fixture
