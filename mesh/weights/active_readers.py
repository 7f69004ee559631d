"""The versions that are being fetched, so that a version is kept while a slow receiver still needs it.

Invariant: a receiver with pauses below `GRACE_S` between buckets counts as fetching all the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollmesh.mesh.trajectory.versions import PolicyVersion

# From the end of one bucket to the beginning of the next, on a busy machine.
GRACE_S = 5.0


class ActiveReaders:
    """Counts transfers by version; may be used from any thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[PolicyVersion, int] = {}
        self._ended: dict[PolicyVersion, float] = {}

    @contextmanager
    def reading(self, policy: PolicyVersion) -> Iterator[None]:
        """Counts a reader of a version's bytes while the context lasts."""
        with self._lock:
            self._open[policy] = self._open.get(policy, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._open[policy] -= 1
                if not self._open[policy]:
                    del self._open[policy]
                now = self._clock()
                self._ended = {old: at for old, at in self._ended.items() if now - at < GRACE_S} | {policy: now}

    def active(self, policy: PolicyVersion) -> bool:
        """True if a version is being fetched, or was a moment ago."""
        with self._lock:
            return policy in self._open or self._clock() - self._ended.get(policy, -GRACE_S) < GRACE_S
