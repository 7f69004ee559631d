"""Changes by other fronts are read at once, many of them together, and none is missed."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.buffer.policy.rules import rules_of
from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.server.background_tasks import _HintFollower
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.side_files import SideFileStore
from rollmesh.buffer.store.store import Store
from rollmesh.buffer.store.table_snapshot import TableSnapshot
from rollmesh.mesh.tables import TABLES, TRAIN
from tests.buffer.both_machines import CLOCK
from tests.buffer.mesh_fixture import TIMEOUT_S, make_config, make_task


class Table:
    """A table that other fronts change; `read` counts the readings, `pauses` are those of its follower."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rev = 0
        self.read = 0
        self.snapshots = {"train": TableSnapshot()}
        self.pauses: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, _seconds: float) -> None:
        over = asyncio.Event()
        self.pauses.put_nowait(over)
        await over.wait()

    async def refresh(self, table: str) -> TableSnapshot:
        self.read += 1
        self.snapshots[table] = TableSnapshot(rev=self.rev)
        return self.snapshots[table]


async def test_a_burst_of_changes_is_read_at_once_and_then_together(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch)
    front: Any = SimpleNamespace(store=table)
    follower = _HintFollower(front, "train")
    running = asyncio.create_task(follower.run())

    def change(rev: int, *, hint: bool) -> None:
        table.rev = rev
        if hint:
            follower.note(rev)

    async with asyncio.timeout(30):
        change(1, hint=True)
        pause = await table.pauses.get()
        assert table.read == 1, "the first without delay"
        for rev in range(2, 200):
            change(rev, hint=True)
        pause.set()
        pause = await table.pauses.get()
        assert (table.read, table.snapshots["train"].rev) == (2, 199)
        change(200, hint=False)
        pause.set()
        while table.read < 3:
            await asyncio.wait([running], timeout=0.001)
        assert table.snapshots["train"].rev == 200, "a change shortly after a hint sends none"
        follower.note(150)
        pause = await table.pauses.get()
        assert table.read == 3, "a hint that came late says nothing new"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_changes_within_a_moment_send_one_hint(redis_url: str, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    keys = Keys(name)
    access = RedisAccess(redis_url, keys.run, clock=CLOCK)
    store, config = Store(access, name, SideFileStore(tmp_path, 1)), make_config(tmp_path, redis_url)
    rules = {table: rules_of(config, table) for table in TABLES}

    async def set_clock(ms: int) -> None:
        await access.client.set(f"{keys.run}:test_clock", ms)

    await set_clock(1_000_000)
    for front in ("left", "right"):
        await store.bootstrap(rules, "{}", front_id=front, member_ttl_ms=1000, sole=False)
    await store.resume(TRAIN, "learner", 0, takeover=False, force=False, lease_ms=1000, call=1)
    try:
        async with access.subscribed(keys.wake) as subscription, asyncio.timeout(TIMEOUT_S):
            hints = (message["data"] async for message in subscription.listen())

            async def sent_at(ms: int, ordinal: int) -> int:
                """Hints that a change at a time sends."""
                await set_clock(ms)
                await store.seed(
                    TRAIN, 1, [make_task(ordinal)], end_of_data=False, withdraw=False, call=ordinal, reserves=[1]
                )
                await access.client.publish(keys.wake, "end")
                count = 0
                while await anext(hints) != b"end":
                    count += 1
                return count

            changes = [1_001_000, 1_001_000, 1_001_019, 1_001_020, 1_001_030, 900_000]
            assert [await sent_at(ms, 1 + index) for index, ms in enumerate(changes)] == [1, 0, 0, 1, 0, 1]
    finally:
        await access.close()
