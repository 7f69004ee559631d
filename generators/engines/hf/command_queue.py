"""Between the threads that ask and the one that decodes.

Invariants: commands are taken in the order in which they were put; a request is in flight from its submission until its
result has been delivered; once the engine has failed or is stopping nothing new is taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable

from rollmesh.generators.engines.hf.commands import Abort, Command, Submit
from rollmesh.generators.engines.interface import EngineError, GenerationRequest
from rollmesh.mesh.errors import PayloadError


class CommandQueue:
    """Commands for the engine's thread, and what is in flight."""

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
        """The engine has been told to stop."""
        return self._stopping

    @property
    def failure(self) -> EngineError | None:
        """What ended the engine."""
        return self._failure

    @property
    def in_flight(self) -> set[str]:
        """Requests without a result; a copy."""
        with self._changed:
            return set(self._in_flight)

    def count(self) -> int:
        """Of requests in flight; takes no lock."""
        return len(self._in_flight)

    def check(self) -> None:
        """Raises EngineError where the engine takes nothing any more."""
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {self._failure.message}", hint="restart the generator")
        if self._stopping:
            raise EngineError("the engine is stopping", hint="submit to another generator")

    def put(self, command: Command) -> None:
        """Hands over a command.

        Raises:
            EngineError: see `check`.
        """
        with self._changed:
            self.check()
            self._commands.append(command)
            self._changed.notify_all()

    def submit(self, requests: tuple[GenerationRequest, ...]) -> None:
        """Hands over requests, all or none.

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
        """Hands over an abort; of an engine that is gone nothing is left to be aborted."""
        with self._changed:
            self._commands.append(Abort(set(request_ids)))
            self._changed.notify_all()

    def stop(self) -> None:
        """Asks the thread to end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing was in flight any more within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    # --- the engine's thread ---

    def pop_all(self, has_work: Callable[[], bool]) -> deque[Command]:
        """All commands; waits for one while there is no work."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands) or self._stopping or has_work())
            taken, self._commands = self._commands, deque()
        return taken

    def ended(self, request_ids: Collection[str]) -> None:
        """Their results have been delivered."""
        with self._changed:
            self._in_flight.difference_update(request_ids)
            self._changed.notify_all()

    def fail(self, failure: EngineError) -> deque[Command]:
        """Accepts nothing more, and nothing is in flight; returns the commands that will not be carried out."""
        with self._changed:
            self._failure = failure
            self._in_flight.clear()
            left, self._commands = self._commands, deque()
            self._changed.notify_all()
        return left
