"""A standing stream tells the server's silence from a fault of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollmesh.buffer.client.reconnecting_stream import ReconnectingStream
from rollmesh.mesh.errors import RollmeshError, UnreachableError

DEADLINE_S = 240.0


class Call:
    """A call whose server says some words and then nothing."""

    def __init__(self, words: int) -> None:
        self._words = words

    async def __aiter__(self) -> AsyncIterator[str]:
        for _ in range(self._words):
            yield "word"
        await asyncio.Event().wait()

    async def write(self, request: Any) -> None:
        """Takes anything."""

    def cancel(self) -> None:
        """Nothing runs."""


class Stream(ReconnectingStream):
    """Opens calls of a number of words; what it receives fails where it is told to."""

    def __init__(self, words: int, fault: Exception | None = None) -> None:
        self.opened = 0
        self.ended: asyncio.Future[RollmeshError] = asyncio.get_running_loop().create_future()
        self._words = words
        self._fault = fault
        super().__init__("stream", 0.2)

    def _start_call(self) -> Any:
        self.opened += 1
        return Call(self._words)

    def _replay_requests(self) -> list[Any]:
        self._set_deadline(0.05)
        return []

    def _on_response(self, response: Any) -> None:
        if self._fault is not None:
            raise self._fault

    def _on_failure(self, error: RollmeshError) -> None:
        self.ended.set_result(error)


async def test_a_silent_server_is_tried_again_until_the_patience_is_over() -> None:
    stream = Stream(words=0)
    try:
        error = await asyncio.wait_for(stream.ended, DEADLINE_S)
        assert isinstance(error, UnreachableError)
        assert "has sent nothing" in error.message
        assert stream.opened > 1
    finally:
        await stream.close()


async def test_a_time_that_is_up_elsewhere_is_no_silence_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(words=1, fault=TimeoutError("of the owner's"))
    try:
        error = await asyncio.wait_for(stream.ended, DEADLINE_S)
        assert "of the owner's" in error.message
        assert not isinstance(error, UnreachableError)
        assert stream.opened == 1
        assert "stream failed" in caplog.text
    finally:
        await stream.close()
