"""Requests and tokens per minute, as pure decisions over a given clock.

Invariant: what is taken is taken at once, also where it has to wait. So requests that wait are begun in their order,
and together they never exceed a rate.
"""

from __future__ import annotations

# Seconds of a rate that may be used at once after a time without requests.
_BURST_S = 10.0
# Longest pause that an endpoint can ask for.
_LONGEST_PAUSE_S = 60.0


class TokenBucket:
    """One rate.

    Args:
        per_minute: the rate.
        now: seconds of the clock.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_s = per_minute / 60.0
        self._size = max(1.0, self._per_s * _BURST_S)
        self._level = self._size
        self._at = now

    def delay_s(self, amount: float, now: float) -> float:
        """Seconds until an amount may be used; one above the bucket's size waits for a full bucket."""
        self._fill(now)
        return max(0.0, (min(amount, self._size) - self._level) / self._per_s)

    def take(self, amount: float, now: float) -> None:
        """Uses an amount; a negative one gives it back."""
        self._fill(now)
        self._level = min(self._size, self._level - amount)

    def _fill(self, now: float) -> None:
        self._level = min(self._size, self._level + max(0.0, now - self._at) * self._per_s)
        self._at = max(self._at, now)


class Limits:
    """All rates of a process, and pauses that the endpoint asks for.

    Args:
        requests_per_minute, tokens_per_minute: None: no limit.
        now: seconds of the clock.
    """

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None, now: float) -> None:
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute, now)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute, now)
        self._paused_until = now

    def delay_s(self, tokens: int, now: float) -> float:
        """Seconds until a request with so many tokens may be sent."""
        requests_s = 0.0 if self._requests is None else self._requests.delay_s(1, now)
        tokens_s = 0.0 if self._tokens is None else self._tokens.delay_s(tokens, now)
        return max(requests_s, tokens_s, self._paused_until - now)

    def take(self, tokens: int, now: float, *, requests: int = 1) -> None:
        """Counts a request and its tokens, or corrects their number; negative ones are given back."""
        if self._requests is not None:
            self._requests.take(requests, now)
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def pause(self, seconds: float, now: float) -> None:
        """Sends nothing for a time, as the endpoint has asked; a minute at most."""
        self._paused_until = max(self._paused_until, now + min(seconds, _LONGEST_PAUSE_S))
