"""Engines over hostile functions, closed whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.workers import slot

HOSTILE = Path(__file__).parent / "hostile.py"


@pytest.fixture
def worker_processes() -> Callable[[], list[psutil.Process]]:
    """Those of this process that come from now on, ended but unreaped ones included."""
    before = {child.pid for child in psutil.Process().children()}

    def found() -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process().children()
            if child.pid not in before
            if child.status() == psutil.STATUS_ZOMBIE or "rollmesh.reward_service.workers" in " ".join(child.cmdline())
        ]

    return found


@pytest_asyncio.fixture
async def make_engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., ScoringEngine]]:
    """`make_engine("compute_score", ...)`: an engine over functions of `hostile.py`, or other paths and names.

    It looks at its workers all the time. A call that hangs says itself that its time is over (`hostile.overdue`). No
    other is ended, however slow the machine is.
    """
    next_check_s = slot.Slot._next_check_s

    def soon(*arguments: Any) -> float | None:
        patience = next_check_s(*arguments)
        return None if patience is None else min(patience, 0.05)

    monkeypatch.setattr(slot.Slot, "_next_check_s", soon)
    # A look that comes late would give every call its time again.
    monkeypatch.setattr(slot, "_ABSENT_S", float("inf"))
    made: list[ScoringEngine] = []

    def make(*names: str, **options: Any) -> ScoringEngine:
        specs = [name if ":" in name or name == "math" else f"{HOSTILE}:{name}" for name in names]
        made.append(ScoringEngine(specs, **options))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()
