"""Requests and tokens per minute, as pure decisions over a given clock.

Invariant: what is taken is taken at once, also where it has to wait. So requests that wait are begun in their order,
and together they never exceed a rate. A rate may change while they wait: each waits until the amount before it has
been supplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Seconds of a rate that may be used at once after a time without requests.
_BURST_S = 10.0
# Longest pause that an endpoint can ask for.
_LONGEST_PAUSE_S = 60.0
# Rounding errors of amounts.
_ROUNDING = 1e-6


class TokenBucket:
    """One rate.

    Args:
        per_minute: the rate.
        now: seconds of the clock.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._whole_per_s = self._per_s = per_minute / 60.0
        self._size = max(1.0, self._per_s * _BURST_S)
        self._level = self._size
        self._supplied = 0.0
        self._at = now

    def set_share(self, share: float, now: float) -> None:
        """Changes the rate to a share of the whole one, from 0 to 1. A larger one adds nothing at once."""
        self._fill(now)
        self._per_s = share * self._whole_per_s
        self._size = max(1.0, self._per_s * _BURST_S) if share else 0.0
        self._level = min(self._size, self._level)

    def delay_s(self, amount: float, now: float) -> float:
        """Seconds until an amount may be used; one above the bucket's size waits for a full bucket."""
        self._fill(now)
        return self._seconds(min(amount, self._size) - self._level)

    def take(self, amount: float, now: float) -> float:
        """Uses an amount, or gives a negative one back; returns the supply with which it may be used."""
        self._fill(now)
        due = self._supplied + max(0.0, min(amount, self._size) - self._level)
        self._level = min(self._size, self._level - amount)
        return due

    def left_s(self, due: float, now: float) -> float:
        """Seconds until a supply that `take` has named."""
        self._fill(now)
        return self._seconds(due - self._supplied)

    def _seconds(self, missing: float) -> float:
        if missing <= _ROUNDING:
            return 0.0
        return missing / self._per_s if self._per_s else math.inf

    def _fill(self, now: float) -> None:
        added = min(self._size - self._level, max(0.0, now - self._at) * self._per_s)
        self._level += added
        self._supplied += added
        self._at = max(self._at, now)


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a request in the order of both rates, as `TokenBucket.take` returns it."""

    requests: float = 0.0
    tokens: float = 0.0


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

    def set_share(self, share: float, now: float) -> None:
        """Changes all rates to a share of the whole ones, from 0 to 1."""
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.set_share(share, now)

    def delay_s(self, tokens: int, now: float) -> float:
        """Seconds until a request with so many tokens may be sent."""
        requests_s = 0.0 if self._requests is None else self._requests.delay_s(1, now)
        tokens_s = 0.0 if self._tokens is None else self._tokens.delay_s(tokens, now)
        return max(requests_s, tokens_s, self._paused_until - now)

    def take(self, tokens: int, now: float, *, requests: int = 1) -> Turn:
        """Counts a request and its tokens, or corrects their number; negative ones are given back."""
        return Turn(
            0.0 if self._requests is None else self._requests.take(requests, now),
            0.0 if self._tokens is None else self._tokens.take(tokens, now),
        )

    def left_s(self, turn: Turn, now: float) -> float:
        """Seconds until the turn of a request that was counted."""
        requests_s = 0.0 if self._requests is None else self._requests.left_s(turn.requests, now)
        tokens_s = 0.0 if self._tokens is None else self._tokens.left_s(turn.tokens, now)
        return max(requests_s, tokens_s, self._paused_until - now)

    def pause(self, seconds: float, now: float) -> None:
        """Sends nothing for a time, as the endpoint has asked; a minute at most."""
        self._paused_until = max(self._paused_until, now + min(seconds, _LONGEST_PAUSE_S))
