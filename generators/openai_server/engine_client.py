"""Requests to the engine for callers that wait for each of them.

Invariants: unfinished requests of a caller are aborted when it leaves. A caller gets its requests' events in order, and
the result of each as the last.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import GenerationRequest, GenerationResult, TokenEvent

_PREFIX = "call-"
Event = TokenEvent | GenerationResult


class EngineClient:
    """The waiting callers and their requests.

    Args:
        engine: decodes.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._waiting: dict[str, asyncio.Queue[Event]] = {}
        self._ids = itertools.count()

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return len(self._waiting)

    def new_id(self) -> str:
        """A name for a request."""
        return f"{_PREFIX}{next(self._ids)}"

    @asynccontextmanager
    async def open(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[asyncio.Queue[Event]]:
        """Submits requests with names of `new_id`; the queue gets their events and results.

        Raises:
            PayloadError: the engine refuses one.
            EngineError: it is not running.
        """
        queue: asyncio.Queue[Event] = asyncio.Queue()
        names = [request.request_id for request in requests]
        self._waiting.update(dict.fromkeys(names, queue))
        try:
            self._engine.submit(requests)
            yield queue
        finally:
            left = [name for name in names if self._waiting.pop(name, None) is not None]
            if left:
                self._engine.abort(left)

    def abort(self, names: Iterable[str]) -> None:
        """Ends requests early; their callers get the results."""
        self._engine.abort([name for name in names if name in self._waiting])

    def accept_results(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        """Passes results to waiting callers, and returns those that are not theirs."""
        others = []
        for result in results:
            queue = self._waiting.pop(result.request_id, None)
            if queue is not None:
                queue.put_nowait(result)
            elif not result.request_id.startswith(_PREFIX):
                others.append(result)
        return others

    def accept_tokens(self, events: Iterable[TokenEvent]) -> None:
        """Passes events to waiting callers."""
        for event in events:
            queue = self._waiting.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)
