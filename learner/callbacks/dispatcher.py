"""Calls callbacks, each in a thread of its own, and decides what becomes of one that raises or hangs.

Invariants: `emit` never blocks and never raises. A callback gets its events in order, one call at a time, and delays no
other. One that raises stays in use. One that hangs, or is late by `LIMIT` events, is left out from then on: its
thread cannot be ended. A call that lasts too long is noticed at the next event, or at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rollmesh.learner.callbacks.interface import Callback, Event, RunControl
from rollmesh.mesh.errors import CallbackError
from rollmesh.mesh.runtime.job_queue import JobQueue

log = logging.getLogger(__name__)
LIMIT = 10_000
"""Events that wait for one callback at most."""


@dataclass(frozen=True, slots=True)
class CallbackRules:
    """Settings of the calls.

    Attributes:
        on_error: `stop` ends the run with a callback's first error, `log` only counts them.
        timeout_s: longest call.
    """

    on_error: Literal["stop", "log"]
    timeout_s: float


class CallbackDispatcher:
    """Hands the events of a run to its callbacks.

    Args:
        callbacks: in any number, none included.
        run: handed to every call.
        rules: of the calls.
        fail: ends the run with an error.

    Attributes:
        failed: calls that have raised or hung.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        run: RunControl,
        rules: CallbackRules,
        fail: Callable[[CallbackError], None],
    ) -> None:
        self._rules = rules
        self._fail = fail
        self._lock = threading.Lock()
        self.failed = 0
        self._threads = [_CallbackThread(callback, run, rules.timeout_s, self._take_error) for callback in callbacks]

    def emit(self, event: Event) -> None:
        """Queues an event for every callback."""
        for thread in self._threads:
            thread.put(event)

    def metrics(self) -> dict[str, int]:
        """Calls that have failed, as a metric; empty without callbacks."""
        return {"callbacks/failed": self.failed} if self._threads else {}

    def close(self, timeout_s: float) -> None:
        """Waits until all events are delivered.

        Args:
            timeout_s: for all of them; a callback that takes longer hangs.
        """
        for thread in self._threads:
            thread.close()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.wait(until - time.monotonic())

    def _take_error(self, error: CallbackError, cause: BaseException | None) -> None:
        with self._lock:
            self.failed += 1
            is_first = self.failed == 1
        if self._rules.on_error == "stop":
            if is_first:
                log.error("%s", error, exc_info=cause)
                self._fail(error)
        else:
            log.warning("%s; the training continues", error.message, exc_info=cause)


class _CallbackThread:
    """The thread of one callback."""

    def __init__(
        self,
        callback: Callback,
        run: RunControl,
        timeout_s: float,
        take_error: Callable[[CallbackError, BaseException | None], None],
    ) -> None:
        self._callback = callback
        self._run_control = run
        self._name = type(callback).__name__
        self._timeout_s = timeout_s
        self._take_error = take_error
        self._events: JobQueue[Event] = JobQueue(LIMIT)
        # The event whose call is in progress, and since when.
        self._present: tuple[Event, float] | None = None
        self._is_left_out = False
        self._thread = threading.Thread(target=self._run, name=f"callback {self._name}", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        if self._is_left_out:
            return
        present = self._present
        if present is not None and (lasted_s := time.monotonic() - present[1]) > self._timeout_s:
            self._leave_out(f"has handled {type(present[0]).__name__} for {lasted_s:.0f} s")
        elif not self._events.put(event):
            self._leave_out(f"is late by {LIMIT} events")

    def close(self) -> None:
        self._events.close()

    def wait(self, timeout_s: float) -> None:
        if self._is_left_out:
            return
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self._leave_out("has not handled the last events in time")

    def _leave_out(self, trouble: str) -> None:
        self._is_left_out = True
        self._events.close(drop=True)
        error = CallbackError(
            f"callback {self._name} {trouble}, and is not called any more",
            hint="hand long work to a process or thread of its own, or raise logging.callback_timeout_s",
        )
        self._take_error(error, None)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            self._present = event, time.monotonic()
            try:
                event.deliver(self._callback, self._run_control)
            except BaseException as cause:  # noqa: BLE001 - users' code may raise anything, SystemExit included
                error = CallbackError(
                    f"callback {self._name} raised {type(cause).__name__} at {type(event).__name__}: {cause}",
                    hint="correct it, or set logging.callback_errors=log to train on whatever it raises",
                )
                self._take_error(error, cause)
            finally:
                self._present = None
