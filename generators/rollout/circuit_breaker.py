"""A circuit breaker: bounds the groups that a generator takes on while all of them fail. A pure state machine.

A generator that fails at once at every group is always free, and would take the prompts of a whole run. So after
`FAILURES_IN_A_ROW` failed groups it takes one group at a time, each after a pause that doubles up to `MAX_PAUSE_S`.
Invariants: one answered member closes the breaker; groups that were under way when a pause began do not prolong it.
Times are seconds of a monotonic clock that the caller reads.
"""

from __future__ import annotations

FAILURES_IN_A_ROW = 4
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class CircuitBreaker:
    """The circuit breaker of one generator."""

    def __init__(self) -> None:
        self._failed = self._tries = 0
        self._again_at = 0.0
        self._reason = ""

    def record_success(self) -> None:
        """Closes the breaker: a member was answered."""
        self._failed = self._tries = 0

    def record_failure(self, now: float, reason: str) -> float:
        """Records that all of a group has failed; returns the seconds until the next may be taken on."""
        self._failed += 1
        self._reason = reason
        if self._failed < FAILURES_IN_A_ROW:
            return 0.0
        if now >= self._again_at:
            self._again_at = now + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._tries, 10))
            self._tries += 1
        return self._again_at - now

    def limit_credits(self, credits_: int, now: float, *, at_work: bool) -> int:
        """The part of `credits_` groups that may be taken on; `at_work`: some are being generated."""
        if self._failed < FAILURES_IN_A_ROW:
            return credits_
        return 0 if at_work or now < self._again_at else min(1, credits_)

    @property
    def waiting_reason(self) -> str:
        """The reason why fewer are taken on; empty where all is well."""
        if self._failed < FAILURES_IN_A_ROW:
            return ""
        return f"the last {self._failed} groups failed here, one is tried at a time: {self._reason}"
