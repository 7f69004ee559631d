"""Answers the requests of a stream in their order, while several of them are in progress."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Request = TypeVar("Request")
Response = TypeVar("Response")


async def answer_in_order(
    requests: AsyncIterator[Request], answer: Callable[[Request], Coroutine[Any, Any, Response]], at_once: int
) -> AsyncIterator[Response]:
    """Responses in the order of the requests; a request starts as soon as fewer than `at_once` are in progress.

    If a request fails, earlier requests are still answered first; then the error is raised.
    """
    source = aiter(requests)
    reading: asyncio.Task[Any] | None = asyncio.create_task(_next(source))
    answering: deque[asyncio.Task[Response]] = deque()
    try:
        while reading is not None or answering:
            while answering and answering[0].done():
                yield answering.popleft().result()
            room = len(answering) < at_once
            if reading is not None and reading.done() and room and (not answering or reading.exception() is None):
                request = reading.result()
                reading = asyncio.create_task(_next(source)) if request else None
                answering.extend(asyncio.create_task(answer(item)) for item in request)
                continue
            waited: set[asyncio.Task[Any]] = {answering[0]} if answering else set()
            if reading is not None and room and not reading.done():
                waited.add(reading)
            if waited:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left = [task for task in (reading, *answering) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _next(source: Any) -> list[Any]:
    """The next request, alone in a list; an empty one at the end."""
    awaitable: Awaitable[Any] = anext(source, _END)
    request = await awaitable
    return [] if request is _END else [request]


_END = object()
