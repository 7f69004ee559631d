"""Background tasks: all are waited for, and no error is lost."""

from __future__ import annotations

import asyncio
import logging

from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors


async def test_an_error_is_handed_over_once_and_a_cancellation_is_none() -> None:
    errors: list[tuple[str, BaseException]] = []
    tasks = BackgroundTasks(lambda name, error: errors.append((name, error)))

    async def fails() -> None:
        raise ValueError("lost")

    tasks.spawn(fails(), "the one that fails")
    tasks.spawn(asyncio.Event().wait())
    assert len(tasks) == 2
    async with asyncio.timeout(180):
        while len(tasks) == 2:
            await asyncio.sleep(0)
        await tasks.close()
    assert not len(tasks)
    assert [(name, str(error)) for name, error in errors] == [("the one that fails", "lost")]


async def test_the_end_is_waited_for_no_longer_than_asked() -> None:
    tasks = BackgroundTasks(log_errors(logging.getLogger(__name__)))
    gate, ended = asyncio.Event(), []

    async def work() -> None:
        await gate.wait()
        ended.append(True)

    assert await tasks.drain() == 0
    tasks.spawn(work())
    assert await tasks.drain(0.01) == 1
    gate.set()
    async with asyncio.timeout(180):
        assert await tasks.drain() == 0
    assert ended == [True]


async def test_errors_are_logged_with_the_name_of_their_task(caplog) -> None:
    tasks = BackgroundTasks(log_errors(logging.getLogger(__name__)))

    async def fails() -> None:
        raise ValueError("unexpected")

    tasks.spawn(fails(), "the report")
    async with asyncio.timeout(180):
        await tasks.drain()
    assert [record.getMessage() for record in caplog.records] == ["the report failed"]
    assert "unexpected" in caplog.text


async def test_what_a_task_starts_at_its_end_is_waited_for_too() -> None:
    tasks = BackgroundTasks(log_errors(logging.getLogger(__name__)))
    ended, started = [], asyncio.Event()

    async def clean_up() -> None:
        await asyncio.sleep(0)
        ended.append(True)

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            tasks.spawn(clean_up())

    tasks.spawn(work())
    async with asyncio.timeout(180):
        await started.wait()
        await tasks.close()
    assert ended == [True]
    assert not len(tasks)
