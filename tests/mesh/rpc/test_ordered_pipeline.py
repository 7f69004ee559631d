"""Requests of a stream are answered in their order, several at a time, and none is taken too early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollmesh.mesh.rpc.ordered_pipeline import answer_in_order


async def _numbers(count: int, taken: list[int]) -> AsyncIterator[int]:
    for number in range(count):
        taken.append(number)
        yield number


async def test_answers_keep_the_order_of_the_requests() -> None:
    gates = [asyncio.Event() for _ in range(3)]

    async def answer(number: int) -> int:
        # The later ones are done first.
        if number < 2:
            await gates[number + 1].wait()
        gates[number].set()
        return number

    async with asyncio.timeout(180):
        assert [found async for found in answer_in_order(_numbers(3, []), answer, 3)] == [0, 1, 2]


async def test_no_more_than_so_many_are_under_way() -> None:
    taken: list[int] = []
    running = most = 0

    both = asyncio.Event()

    async def answer(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            both.set()
        await both.wait()
        running -= 1
        return number

    async with asyncio.timeout(180):
        assert [found async for found in answer_in_order(_numbers(20, taken), answer, 2)] == list(range(20))
    assert most == 2


async def test_a_lone_request_is_answered_while_the_stream_stays_open() -> None:
    open_stream = asyncio.Event()

    async def one() -> AsyncIterator[int]:
        yield 7
        await open_stream.wait()

    async def answer(number: int) -> int:
        return number

    stream = answer_in_order(one(), answer, 3)
    async with asyncio.timeout(180):
        assert await anext(stream) == 7
    open_stream.set()
    assert [found async for found in stream] == []


async def test_a_failing_request_comes_after_the_answers_before_it() -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise ValueError("no message")

    async def answer(number: int) -> int:
        await asyncio.sleep(0.01)
        return number

    found = []
    with pytest.raises(ValueError, match="no message"):
        async for response in answer_in_order(broken(), answer, 3):
            found.append(response)  # noqa: PERF401  what came before the failure counts
    assert found == [1]


async def test_what_is_under_way_is_cancelled_with_the_stream() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(_number: int) -> int:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 0

    async def read() -> list[int]:
        return [found async for found in answer_in_order(_numbers(1, []), answer, 3)]

    reading = asyncio.create_task(read())
    async with asyncio.timeout(180):
        await begun.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    async with asyncio.timeout(180):
        await cancelled.wait()
