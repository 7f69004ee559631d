"""The worlds of engines, for tests on several ranks: the same for all folders here."""

from __future__ import annotations

from rollmesh.testing.fixtures import engine_models, engine_worlds, world  # noqa: F401 - fixtures
