"""Requests to a running learner, handed from the event loop to the training thread.

Requests are served between two steps, or at once where the learner waits for groups. All methods may be called from
any thread, and `stop` from a signal handler.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from rollmesh.mesh.errors import RollmeshError

REQUEST = "request"
"""Reason of an end that a user or a callback has asked for: the run counts as finished."""
NATURAL_ENDS = ("steps", "stop_at", "end_of_data")
"""Reasons of an end that the configuration has set."""
FINISHED = (*NATURAL_ENDS, REQUEST)
"""Reasons of an end after which the run counts as finished; after others it is only interrupted."""


class ControlRequests:
    """Requests to stop and to write a checkpoint.

    Attributes:
        wake: called after every request, to end a wait for groups; set once the learner waits.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], object] = lambda: None
        self._stop_reason: str | None = None
        self._error: RollmeshError | None = None
        # A signal handler interrupts the thread that may hold the lock: it must be re-entrant.
        self._lock = threading.RLock()
        self._checkpoints: deque[Future[tuple[Path, int]]] = deque()

    @property
    def stop_reason(self) -> str | None:
        """The reason to end the run after the present step; None without one."""
        return self._stop_reason

    @property
    def error(self) -> RollmeshError | None:
        """The error that ends the run; None without one."""
        return self._error

    @property
    def pending(self) -> bool:
        """True where the training thread has something to do at once: the run's end, or a checkpoint."""
        return self._stop_reason is not None or self._error is not None or bool(self._checkpoints)

    def stop(self, reason: str) -> None:
        """Asks for an orderly end; the first reason stays."""
        self._stop_reason = self._stop_reason or reason
        self.wake()

    def fail(self, error: RollmeshError) -> None:
        """Ends the run with an error at the next occasion; the first error stays."""
        self._error = self._error or error
        self.wake()

    def raise_failure(self) -> None:
        """Raises the error given to `fail`."""
        if self._error is not None:
            raise self._error

    def request_checkpoint(self) -> Future[tuple[Path, int]]:
        """Asks for a checkpoint; the future gives its folder and version once it is committed."""
        future: Future[tuple[Path, int]] = Future()
        with self._lock:
            self._checkpoints.append(future)
        self.wake()
        return future

    def pop_checkpoint_requests(self) -> list[Future[tuple[Path, int]]]:
        """The open requests; the caller answers them all."""
        with self._lock:
            taken = list(self._checkpoints)
            self._checkpoints.clear()
        return taken
