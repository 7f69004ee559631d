"""State of an engine that threads share: whether it takes work, requests in flight, and promised futures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from rollmesh.generators.engines.interface import EngineError
from rollmesh.mesh.errors import PayloadError


class InflightRegistry:
    """The requests in flight and the promises of one engine; any thread.

    Attributes:
        failure: what ended the engine; None while it lives.
        stopping: it was asked to stop.
        up: it has started.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._in_flight: set[str] = set()
        self._promises: set[Future[Any]] = set()
        self.failure: EngineError | None = None
        self.stopping = False
        self.up = False

    @property
    def in_flight(self) -> int:
        """Requests without a result."""
        return len(self._in_flight)

    @contextmanager
    def accepting(self, promise: Future[Any] | None = None) -> Iterator[None]:
        """Keeps the engine open while work is posted to its thread.

        Args:
            promise: a future that will be resolved, or refused where the engine ends.

        Raises:
            EngineError: the engine is not running.
        """
        with self._changed:
            self._check()
            yield
            if promise is not None:
                self._promises.add(promise)
        if promise is not None:
            promise.add_done_callback(self._forget_promise)

    def add(self, request_ids: Iterable[str]) -> None:
        """Adds requests in flight, all or none; to be called inside `accepting`.

        Raises:
            PayloadError: one of them is already, or comes twice.
        """
        ids: set[str] = set()
        for request_id in request_ids:
            if request_id in self._in_flight or request_id in ids:
                raise PayloadError("request_id", f"{request_id!r} is already in flight")
            ids.add(request_id)
        self._in_flight |= ids

    def mark_delivered(self, request_ids: Iterable[str]) -> None:
        """Removes requests whose results were delivered."""
        with self._changed:
            self._in_flight.difference_update(request_ids)
            self._changed.notify_all()

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
            self._check()

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight; False where the time ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    def run_if_open(self, work: Callable[[], None]) -> None:
        """Runs `work` where the engine is open; does nothing where it is closed."""
        with self._changed:
            if self.failure is None and not self.stopping:
                work()

    def stop(self, last: Callable[[], None]) -> None:
        """Closes it; `last` is run once, and not where the engine has failed."""
        with self._changed:
            if self.failure is None and not self.stopping:
                last()
            self.stopping = True
            self._changed.notify_all()

    def fail(self, failure: EngineError) -> None:
        """Closes it for good: no request gets its result, no promise is kept."""
        with self._changed:
            self.failure = failure
            self._in_flight.clear()
            self._changed.notify_all()
        self.reject_promises(failure)

    def reject_promises(self, error: EngineError) -> None:
        """Fails the promises that are not kept yet."""
        with self._changed:
            promises, self._promises = self._promises, set()
        for promise in promises:
            if not promise.done() and (promise.running() or promise.set_running_or_notify_cancel()):
                promise.set_exception(error)

    def _forget_promise(self, promise: Future[Any]) -> None:
        with self._changed:
            self._promises.discard(promise)

    def _check(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {self.failure.message}", hint="restart the generator")
        if self.stopping:
            raise EngineError("the engine is stopping", hint="submit to another generator")
