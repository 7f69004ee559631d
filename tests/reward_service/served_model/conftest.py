"""A clock that the test turns: a process is silent for as long as the test says, however busy the machine is."""

from __future__ import annotations

import time

import pytest

from rollmesh.reward_service.served_model import model


class Clock:
    """Stands for the module `time` where silence is judged."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all judging models."""
    found = Clock()
    monkeypatch.setattr(model, "time", found)
    monkeypatch.setattr(model, "_LOOK_S", 0.02)
    return found
