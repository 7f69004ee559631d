"""Requests for turns to the engine, one future each.

Invariants: requests of one turn of the event loop reach the engine in one submission, so that equal prompts share their
prefill. One that the engine refuses fails alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import GenerationRequest, GenerationResult
from rollmesh.mesh.errors import PayloadError, RollmeshError

_PREFIX = "turn-"


class TurnRequests:
    """Submits turns to the engine; all methods belong to the event loop's thread."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._waiting: dict[str, asyncio.Future[GenerationResult]] = {}
        self._new: list[GenerationRequest] = []
        self._ids = itertools.count()

    def new_id(self) -> str:
        """A request id that no other has."""
        return f"{_PREFIX}{next(self._ids)}"

    def submit(self, request: GenerationRequest) -> asyncio.Future[GenerationResult]:
        """Submits one turn.

        Returns:
            A future; it fails with PayloadError where the engine refuses the request.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[GenerationResult] = loop.create_future()
        self._waiting[request.request_id] = answer
        if not self._new:
            loop.call_soon(self._submit)
        self._new.append(request)
        return answer

    def abort(self, request_id: str) -> None:
        """Ends a turn early; its future gets the tokens so far."""
        unsent = [request for request in self._new if request.request_id == request_id]
        if unsent:
            self._submit()
        self._engine.abort([request_id])

    def forget(self, request_id: str) -> None:
        """Ends a turn when its result is no longer needed."""
        if self._waiting.pop(request_id, None) is not None:
            self._new = [request for request in self._new if request.request_id != request_id]
            self._engine.abort([request_id])

    def accept_results(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        """Resolves the futures of turns, and returns the results that belong to no turn."""
        others = []
        for result in results:
            if not result.request_id.startswith(_PREFIX):
                others.append(result)
                continue
            answer = self._waiting.pop(result.request_id, None)
            if answer is None or answer.done():
                continue
            if result.refusal:
                answer.set_exception(PayloadError("request", result.refusal))
            else:
                answer.set_result(result)
        return others

    def _submit(self) -> None:
        requests, self._new = self._new, []
        if not requests:
            return
        try:
            self._engine.submit(requests)
        except PayloadError as error:
            if len(requests) == 1:
                self._fail(requests[0], error)
                return
            # All are taken or none.
            for request in requests:
                self._new = [request]
                self._submit()
        except RollmeshError as error:
            for request in requests:
                self._fail(request, error)

    def _fail(self, request: GenerationRequest, error: RollmeshError) -> None:
        answer = self._waiting.pop(request.request_id, None)
        if answer is not None and not answer.done():
            answer.set_exception(error)
