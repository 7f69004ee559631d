"""Coroutines that live and die together: none ends without a word."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.mesh.errors import UnreachableError, WeightsError
from rollmesh.mesh.runtime.task_group import run_together


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def test_one_that_no_one_cancelled_is_a_failure() -> None:
    async def closed_under() -> None:
        raise asyncio.CancelledError

    async with asyncio.timeout(180):
        with pytest.raises(UnreachableError, match="its connection was closed"):
            await run_together(_for_ever(), closed_under())


async def test_the_first_failure_ends_all() -> None:
    ended = []

    async def other() -> None:
        try:
            await _for_ever()
        finally:
            ended.append(True)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise WeightsError("damaged")

    async with asyncio.timeout(180):
        with pytest.raises(WeightsError, match="damaged"):
            await run_together(other(), fails())
    assert ended == [True]


async def test_cancelled_from_outside_they_are_cancelled() -> None:
    task = asyncio.create_task(run_together(_for_ever(), _for_ever()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
