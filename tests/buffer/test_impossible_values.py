"""A value that cannot be, as a fault of ours or a stranger's hand makes one: told in words, and never fatal."""

from __future__ import annotations

import pytest

from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.errors import StoreError
from tests.buffer.mesh_fixture import Mesh
from tests.buffer.packed import set_counter


async def test_a_figure_below_zero_is_told_and_ends_no_front(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(front)
    for name in ("leased", "superseded_writes", "bytes", "reserved", "orphaned", "consumed_bytes"):
        await set_counter(front, "eval", name, -1)
    assert (await learner.client.describe("eval")).counts.leased == 0
    told = await learner.client.ledger("eval")
    assert "leased: the counter says -1, the recount 0" in told.discrepancies
    assert "superseded_writes: the counter says -1, which is negative" in told.discrepancies
    assert front.metrics is not None
    await front.metrics.read()
    again = await mesh.front()
    await again.metrics.read()  # type: ignore[union-attr]


async def test_a_figure_that_is_no_number_is_named_and_ends_no_front(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(front)
    await front.access.client.hset(Keys(front.run_name).table("eval", "reasons"), "failed/why", "much")
    learner.client._retry_s = 0.1
    with pytest.raises(StoreError, match="failed/why in Redis is damaged"):
        await front.metrics.read()  # type: ignore[union-attr]
    assert (await learner.client.describe("train")).table == "train"
