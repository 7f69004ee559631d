"""Second requests for slow ones, as pure decisions.

Invariant: at most a given share of all requests is sent twice.
"""

from __future__ import annotations

from collections import deque

# Answers whose times count, and how many there have to be.
_WINDOW = 256
_LEAST = 20


class Hedging:
    """Decides when a request is sent again while the first is in progress.

    Args:
        share: of requests that may be.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._requests = 0
        self._hedged = 0
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def begin(self) -> float | None:
        """Counts a request: seconds without an answer after which it is slow; None: not known yet."""
        self._requests += 1
        if not self._share or len(self._seconds) < _LEAST:
            return None
        return sorted(self._seconds)[int(0.95 * (len(self._seconds) - 1))]

    def answered(self, seconds: float) -> None:
        """Counts the time of an answer."""
        self._seconds.append(seconds)

    def take(self) -> bool:
        """True if one more request may be sent twice; it counts."""
        if self._hedged + 1 > self._share * self._requests:
            return False
        self._hedged += 1
        return True
