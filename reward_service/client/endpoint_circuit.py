"""A circuit breaker with exponential backoff for failing endpoints. Pure: the clock is an argument.

Closed: calls go through. After `threshold` failures in a row it opens for a backoff, which doubles with every
further failure up to a bound. After the backoff one call at a time probes; a success closes it.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0


@dataclass(slots=True)
class EndpointCircuit:
    """State of one endpoint. Times are monotonic seconds."""

    threshold: int = 2
    failures: int = 0
    open_until: float = 0.0
    _last_error: str = ""

    @property
    def closed(self) -> bool:
        return self.failures < self.threshold

    @property
    def trouble(self) -> str:
        """The last error of an endpoint that does not answer; empty while it does."""
        return "" if self.closed else self._last_error

    def ready_at(self) -> float:
        """Time from which a call may be sent."""
        return 0.0 if self.closed else self.open_until

    def record_success(self) -> None:
        """Records an answer."""
        self.failures = 0
        self.record_sign_of_life()

    def record_sign_of_life(self) -> None:
        """Records that it answered a probe: it is there, and stays on trial until it has answered a call."""
        self._last_error = ""

    def record_failure(self, now: float, error: str, *, fatal: bool = False, pause_s: float = 0.0) -> None:
        """Records a failed call.

        Args:
            fatal: it opens the circuit at once (connection refused, no such service).
            pause_s: seconds in which the server wants no call, at least.
        """
        self.failures = max(self.failures + 1, self.threshold if fatal else 0)
        self._last_error = error
        if not self.closed:
            exponent = min(self.failures - self.threshold, 10)
            self.open_until = now + max(pause_s, min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**exponent))
