"""Changes by other fronts are read at once, and many of them together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.buffer.server.background_tasks import _HintFollower
from rollmesh.buffer.store.table_snapshot import TableSnapshot


class Table:
    """A table that other fronts change; `read` counts the readings."""

    def __init__(self) -> None:
        self.rev = 0
        self.read = 0
        self.snapshots = {"train": TableSnapshot()}
        self.was_read = asyncio.Event()

    async def refresh(self, table: str) -> TableSnapshot:
        self.read += 1
        self.snapshots[table] = TableSnapshot(rev=self.rev)
        self.was_read.set()
        return self.snapshots[table]


async def test_a_burst_of_changes_is_read_at_once_and_then_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = asyncio.Event()

    async def sleep(_seconds: float) -> None:
        await pause.wait()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    table = Table()
    front: Any = SimpleNamespace(store=table)
    follower = _HintFollower(front, "train")
    running = asyncio.create_task(follower.run())
    table.rev = 1
    follower.note(1)
    async with asyncio.timeout(30):
        await table.was_read.wait()
        assert table.read == 1, "the first without delay"
        for rev in range(2, 200):
            table.rev = rev
            follower.note(rev)
        table.was_read.clear()
        pause.set()
        await table.was_read.wait()
    assert (table.read, table.snapshots["train"].rev) == (2, 199), "the last change is not missed"
    follower.note(150)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert table.read == 2, "a hint that came late says nothing new"
