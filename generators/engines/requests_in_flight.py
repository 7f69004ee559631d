"""Requests in flight of an engine, and whether it takes more; any thread.

Invariants: a request is in flight from its submission until its result has been delivered, and never twice at a time.
Once the engine has failed or is stopping nothing new is accepted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from rollmesh.generators.engines.errors import EngineError
from rollmesh.mesh.errors import PayloadError


class RequestsInFlight:
    """The requests in flight of one engine. Engines add other state that their threads share.

    Attributes:
        failure: the error that ended the engine; None while it lives.
        stopping: it was asked to stop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_flight: set[str] = set()
        self.failure: EngineError | None = None
        self.stopping = False

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
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {self.failure.message}", hint="restart the generator")
        if self.stopping:
            raise EngineError("the engine is stopping", hint="submit to another generator")

    def add(self, request_ids: Iterable[str]) -> None:
        """Adds requests, all or none.

        Raises:
            PayloadError: one of them is in flight already, or comes twice.
            EngineError: see `check`.
        """
        with self._changed:
            self.check()
            ids: set[str] = set()
            for request_id in request_ids:
                if request_id in self._in_flight or request_id in ids:
                    raise PayloadError("request_id", f"{request_id!r} is already in flight")
                ids.add(request_id)
            self._in_flight |= ids

    def mark_delivered(self, request_ids: Iterable[str]) -> None:
        """Removes requests after their results were delivered."""
        with self._changed:
            self._in_flight.difference_update(request_ids)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight; False where the time ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    def stop(self) -> None:
        """Closes it to new requests; those in flight stay."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()

    def fail(self, failure: EngineError) -> None:
        """Closes it for good: no request in flight gets its result."""
        with self._changed:
            self.failure = failure
            self._in_flight.clear()
            self._changed.notify_all()
