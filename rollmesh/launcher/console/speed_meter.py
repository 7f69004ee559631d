"""The speed at which generators sample, from one line to the next."""

from __future__ import annotations

# Seconds without a report for which a speed holds.
_HOLDS_S = 5.0


class SpeedMeter:
    """Tokens sampled per second from one line to the next, from the generators' reports about every second.

    The time before the first token does not count. Where nothing was reported between two lines, the last speed holds
    for a while.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        # (Time, tokens) of the last report, and of the last one before the last line.
        self._reported: tuple[float, float] | None = None
        self._shown: tuple[float, float] | None = None
        self._speed: float | None = None

    def observe(self, now_s: float, tokens: float) -> None:
        """Records the run's total."""
        if self._reported is None or tokens > self._reported[1]:
            self._shown = self._shown or (self._reported and (self._now_s, self._reported[1]))
            self._reported = (now_s, tokens)
        self._now_s = now_s

    def since_last(self) -> float | None:
        """Speed over the reports since the last call; None before there were any."""
        if self._shown is not None and self._reported is not None:
            (before_s, before), (now_s, tokens) = self._shown, self._reported
            if now_s > before_s:
                self._speed = (tokens - before) / (now_s - before_s)
            elif self._now_s - now_s > _HOLDS_S:
                self._speed = 0.0
            self._shown = self._reported
        return self._speed
