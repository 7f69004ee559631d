"""State of an engine that threads share: requests in flight, its start, and promised futures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from rollmesh.generators.engines.commands import reject
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.requests_in_flight import RequestsInFlight


class InflightRegistry(RequestsInFlight):
    """The requests in flight and the promises of one engine; any thread.

    Attributes:
        up: it has started.
    """

    def __init__(self) -> None:
        super().__init__()
        self._promises: set[Future[Any]] = set()
        self.up = False

    @contextmanager
    def accepting(self, promise: Future[Any] | None = None) -> Iterator[None]:
        """Keeps the engine open while work is posted to its thread.

        Args:
            promise: a future that will be resolved, or refused where the engine ends.

        Raises:
            EngineError: the engine is not running.
        """
        with self._changed:
            self.check()
            yield
            if promise is not None:
                self._promises.add(promise)
        if promise is not None:
            promise.add_done_callback(self._forget_promise)

    def mark_started(self) -> None:
        """Records that the engine is up."""
        with self._changed:
            self.up = True
            self._changed.notify_all()

    def wait_until_up(self) -> None:
        """Waits for the engine's start to end, which is bounded.

        Raises:
            EngineError: it failed, or was stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.up or self.stopping or self.failure is not None)
            self.check()

    def run_if_open(self, work: Callable[[], None]) -> None:
        """Runs `work` where the engine is open; does nothing where it is closed."""
        with self._changed:
            if self.failure is None and not self.stopping:
                work()

    def stop_after(self, last: Callable[[], None]) -> None:
        """Closes it; `last` is run once, and not where the engine has failed."""
        with self._changed:
            self.run_if_open(last)
            self.stop()

    def fail(self, failure: EngineError) -> None:
        """Closes it for good: no request gets its result, no promise is kept."""
        super().fail(failure)
        self.reject_promises(failure)

    def reject_promises(self, error: EngineError) -> None:
        """Fails the promises that are not kept yet."""
        with self._changed:
            promises, self._promises = self._promises, set()
        for promise in promises:
            reject(promise, error)

    def _forget_promise(self, promise: Future[Any]) -> None:
        with self._changed:
            self._promises.discard(promise)
