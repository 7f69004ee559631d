"""A worker whose functions are coroutine functions: an event loop for the rest of its life.

Invariant: the page shows the unit of the coroutine that runs, and none while all of them wait.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.reward_service.functions import RewardFunction
from rollmesh.reward_service.outcomes import Failed
from rollmesh.reward_service.workers.messages import DONE, pack, unpacker
from rollmesh.reward_service.workers.shared_page import SharedPage
from rollmesh.reward_service.workers.units import READ_BYTES, answer_of, parse

log = logging.getLogger(__name__)

T = TypeVar("T")


def serve(
    connection: socket.socket,
    page: SharedPage,
    functions: Sequence[RewardFunction],
    call_timeout_s: float,
    first: Any,
) -> None:
    """Scores units until the owner hangs up, beginning with a message that has come already."""
    asyncio.run(_EventLoopWorker(connection, page, functions, call_timeout_s).serve(first))


class _EventLoopWorker:
    """Scores units together on an event loop; each answer leaves as soon as it is there."""

    def __init__(
        self, connection: socket.socket, page: SharedPage, functions: Sequence[RewardFunction], call_timeout_s: float
    ) -> None:
        self._connection = connection
        self._page = page
        self._functions = functions
        self._call_timeout_s = call_timeout_s
        self._tasks = BackgroundTasks(log_errors(log))

    async def serve(self, first: Any) -> None:
        """Handles messages until the owner hangs up, beginning with one that has come already."""
        reader, writer = await asyncio.open_unix_connection(sock=self._connection)
        self._accept_message(first, writer)
        messages = unpacker()
        while data := await reader.read(READ_BYTES):
            messages.feed(data)
            for message in messages:
                self._accept_message(message, writer)

    def _accept_message(self, message: Any, writer: asyncio.StreamWriter) -> None:
        index, units = message
        for unit, deadline, blobs in units:
            scoring = self._score(self._functions[index], deadline, blobs)
            self._tasks.spawn(self._score_unit(unit, scoring, writer), f"scoring unit {unit}")

    async def _score_unit(self, unit: int, scoring: Coroutine[Any, Any, bytes], writer: asyncio.StreamWriter) -> None:
        answer = await _with_page(scoring, self._page, unit)
        writer.write(pack([DONE, [[unit, answer]]]))

    async def _score(self, function: RewardFunction, deadline: float, blobs: Sequence[bytes]) -> bytes:
        items, failures = parse(blobs)
        try:
            async with asyncio.timeout(min(self._call_timeout_s, deadline - time.monotonic())):
                outcomes = await function.score_async(items) if items else []
        except TimeoutError:
            why = f"{function.name}: no answer within {self._call_timeout_s:g} s"
            outcomes = [Failed("timeout", why, retryable=True)] * len(items)
        return answer_of(items, failures, outcomes)


@types.coroutine
def _with_page(coroutine: Coroutine[Any, Any, T], page: SharedPage, unit: int) -> Generator[Any, Any, T]:
    """Runs a coroutine, and writes its unit to the page whenever it is the one that runs."""
    step: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        page.begin(unit)
        try:
            awaited = step()
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            page.idle()
        try:
            step = partial(coroutine.send, (yield awaited))
        except BaseException as error:  # noqa: BLE001  # a cancellation or the like, on its way to the coroutine
            step = partial(coroutine.throw, error)
