"""Letting go of weights beside decoding.

Giving memory back to the system takes about as long as a copy of it; whoever drops the last reference pays for that.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

from generators.engines.hf.weights import Staged


class Disposal:
    """Drops references in a thread of its own."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Staged | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hf-engine-disposal", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self, weights: Staged) -> None:
        """Lets go of weights soon; the caller uses them no more."""
        self._queue.put(weights)

    def stop(self) -> None:
        """Ends the thread when it has done what was asked of it."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (weights := self._queue.get()) is not None:
            # Callers may still hold the object: what counts is what it refers to.
            weights.pairs.clear()
