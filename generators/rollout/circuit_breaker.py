"""A circuit breaker for groups: how many a generator takes on while all fail. A clock-fed state machine, without I/O.

A generator that fails at once at whatever it is given is always free, and would take the prompts of a whole run. So
once `IN_A_ROW` groups have failed one after the other it gets one at a time, each after a pause that doubles up to
`MAX_PAUSE_S`. Invariants: one answered member ends this; groups that were under way when a pause began are no tries
and prolong nothing. Times are seconds of a monotonic clock that the caller reads.
"""

from __future__ import annotations

IN_A_ROW = 4
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class CircuitBreaker:
    """Of one generator."""

    def __init__(self) -> None:
        self._failed = self._tries = 0
        self._again_at = 0.0
        self._reason = ""

    def answered(self) -> None:
        """A member was answered."""
        self._failed = self._tries = 0

    def failed(self, now: float, reason: str) -> float:
        """A group has failed, all of it; returns the seconds until the next may be taken on."""
        self._failed += 1
        self._reason = reason
        if self._failed < IN_A_ROW:
            return 0.0
        if now >= self._again_at:
            self._again_at = now + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._tries, 10))
            self._tries += 1
        return self._again_at - now

    def bounds(self, credits_: int, now: float, *, at_work: bool) -> int:
        """So many of `credits_` groups may be taken on; `at_work`: some are being generated."""
        if self._failed < IN_A_ROW:
            return credits_
        return 0 if at_work or now < self._again_at else min(1, credits_)

    @property
    def waiting_reason(self) -> str:
        """Why less is taken on; empty where all is well."""
        if self._failed < IN_A_ROW:
            return ""
        return f"the last {self._failed} groups failed here, one is tried at a time: {self._reason}"
