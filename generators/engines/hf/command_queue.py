"""A queue between the callers' threads and the one that decodes.

Invariants: commands keep their order. A request is in flight from its submission until its result has been delivered.
Once the engine has failed or is stopping nothing new is accepted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable

from rollmesh.generators.engines.hf.commands import Abort, Command, Submit
from rollmesh.generators.engines.interface import EngineError, GenerationRequest
from rollmesh.mesh.errors import PayloadError


class CommandQueue:
    """Commands for the engine's thread, and the requests in flight."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._in_flight: set[str] = set()
        self._stopping = False
        self._failure: EngineError | None = None

    def __bool__(self) -> bool:
        return bool(self._commands)

    @property
    def stopping(self) -> bool:
        """True once the engine has been asked to stop."""
        return self._stopping

    @property
    def failure(self) -> EngineError | None:
        """The error that ended the engine; None while it lives."""
        return self._failure

    @property
    def in_flight(self) -> set[str]:
        """Requests without a result; a copy."""
        with self._changed:
            return set(self._in_flight)

    def count(self) -> int:
        """Number of requests in flight; takes no lock."""
        return len(self._in_flight)

    def check(self) -> None:
        """Raises EngineError where the engine accepts nothing any more."""
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {self._failure.message}", hint="restart the generator")
        if self._stopping:
            raise EngineError("the engine is stopping", hint="submit to another generator")

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
            self.check()
            ids: set[str] = set()
            for request in requests:
                if request.request_id in self._in_flight or request.request_id in ids:
                    raise PayloadError("request_id", f"{request.request_id!r} is already in flight")
                ids.add(request.request_id)
            self._in_flight |= ids
            self._commands.append(Submit(requests))
            self._changed.notify_all()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Queues an abort; an engine that is gone has nothing left to abort."""
        with self._changed:
            self._commands.append(Abort(set(request_ids)))
            self._changed.notify_all()

    def stop(self) -> None:
        """Asks the thread to end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight; False where `timeout_s` ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    # --- the engine's thread ---

    def pop_all(self, has_work: Callable[[], bool]) -> deque[Command]:
        """Removes and returns all commands; waits for one while there is no work."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands) or self._stopping or has_work())
            commands, self._commands = self._commands, deque()
        return commands

    def mark_delivered(self, request_ids: Collection[str]) -> None:
        """Records that their results have been delivered."""
        with self._changed:
            self._in_flight.difference_update(request_ids)
            self._changed.notify_all()

    def fail(self, failure: EngineError) -> deque[Command]:
        """Closes the queue, with nothing in flight; returns the commands that will not be executed."""
        with self._changed:
            self._failure = failure
            self._in_flight.clear()
            commands, self._commands = self._commands, deque()
            self._changed.notify_all()
        return commands
