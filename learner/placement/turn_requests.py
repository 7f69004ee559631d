"""Requests of operators concerning turns, handed from the event loop to the training thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

HOLD_S = 600.0
"""Seconds for which a learner takes no turn where the request does not say: who forgets it does not stop the run."""


class TurnRequests:
    """The permission to take turns. All methods may be called from any thread.

    Args:
        clock: monotonic seconds.

    Attributes:
        wake: called after every request, to end a wait of the training thread.
        given: generators have the devices; cleared by `begin_turn`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until = 0.0
        self._waiting: list[Future[None]] = []
        self.wake: Callable[[], object] = lambda: None
        self.given = False

    @property
    def held_s(self) -> float:
        """Seconds for which no turn may begin; 0 without a request."""
        return max(0.0, self._until - self._clock())

    @property
    def pending(self) -> bool:
        """True where a request waits for its answer."""
        return bool(self._waiting)

    def hold(self, seconds: float) -> Future[None]:
        """Ends the present turn after its batch, and begins no other for some seconds, or for an earlier request's.

        Returns:
            Done when the generators have the devices.
        """
        done: Future[None] = Future()
        with self._lock:
            self._until = max(self._until, self._clock() + (seconds or HOLD_S))
            self._waiting.append(done)
            given = self.given
        if given:
            self.answer()
        self.wake()
        return done

    def begin_turn(self, *, despite_hold: bool = False) -> bool:
        """Records that the learner takes the devices; False where a request does not let it."""
        with self._lock:
            if self.held_s > 0 and not despite_hold:
                return False
            self.given = False
            return True

    def resume(self) -> None:
        """Lets turns begin again."""
        self._until = 0.0
        self.wake()

    def answer(self) -> None:
        """Answers those that wait for the devices: the generators have them."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for done in waiting:
            if done.set_running_or_notify_cancel():
                done.set_result(None)

    def close(self) -> None:
        """Ends the waits: the learner ends."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for done in waiting:
            done.cancel()
