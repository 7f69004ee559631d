"""Spans that are sent as soon as they are put: no test waits for others to come."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.mesh.telemetry.span_export._EVERY_S", 0.01)
