"""Commands of other threads to the engine's thread, which executes them between two decode steps, and their queue.

Invariant: commands keep their order. See `RequestsInFlight` for the requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rollmesh.generators.engines import commands
from rollmesh.generators.engines.commands import Inspect, Pause, Probe, Resume, Sleep, Wake
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf.weights import StagedWeights
from rollmesh.generators.engines.requests_in_flight import RequestsInFlight
from rollmesh.generators.engines.types import GenerationRequest, PartialResponse
from rollmesh.mesh.errors import PayloadError


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """Requests, checked."""

    requests: Sequence[GenerationRequest]


@dataclass(frozen=True, slots=True, eq=False)
class ImagesRead:
    """Requests with their images read: (as submitted, as the model sees it or the reason for a refusal)."""

    requests: Sequence[tuple[GenerationRequest, GenerationRequest | PayloadError]]


@dataclass(frozen=True, slots=True, eq=False)
class Abort:
    """Requests to be ended early."""

    request_ids: set[str]


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Responses to be copied; see `InferenceEngine.progress`."""

    at_least: Mapping[str, int]
    done: Future[list[PartialResponse]]


UpdateWeights = commands.UpdateWeights[StagedWeights]
Command = Submit | ImagesRead | Abort | Progress | Probe | Inspect | UpdateWeights | Pause | Resume | Sleep | Wake


class CommandQueue(RequestsInFlight):
    """Commands for the engine's thread, and the requests in flight."""

    def __init__(self) -> None:
        super().__init__()
        self._commands: deque[Command] = deque()

    def __bool__(self) -> bool:
        return bool(self._commands)

    def put(self, command: Command) -> None:
        """Queues a command.

        Raises:
            EngineError: see `check`.
        """
        with self._changed:
            self.check()
            self._commands.append(command)
            self._changed.notify_all()

    def submit(self, requests: tuple[GenerationRequest, ...]) -> None:
        """Queues requests, all or none.

        Raises:
            PayloadError: an id is in flight already.
            EngineError: see `check`.
        """
        with self._changed:
            self.add(request.request_id for request in requests)
            self._commands.append(Submit(requests))
            self._changed.notify_all()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Queues an abort; an engine that is gone has nothing left to abort."""
        with self._changed:
            self._commands.append(Abort(set(request_ids)))
            self._changed.notify_all()

    # --- the engine's thread ---

    def pop_all(self, has_work: Callable[[], bool]) -> deque[Command]:
        """Removes and returns all commands; waits for one while there is no work."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands) or self.stopping or has_work())
            pending, self._commands = self._commands, deque()
        return pending

    def close(self, failure: EngineError) -> deque[Command]:
        """Closes the queue, with nothing in flight; returns the commands that will not be executed."""
        with self._changed:
            self.fail(failure)
            pending, self._commands = self._commands, deque()
        return pending
