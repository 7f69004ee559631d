"""When a service that died may start again.

Invariant: within any window of `window_s` seconds at most `max_restarts` restarts are granted. Pure: the clock is an
argument.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0


class RestartBudget:
    """Grants restarts with exponentially growing delays.

    Args:
        max_restarts: restarts granted within one window; 0 grants none.
        window_s: length of the window in seconds.
        first_delay_s: delay before the first restart of a window; each further one doubles it.
        max_delay_s: upper bound of the delay.
    """

    def __init__(
        self,
        max_restarts: int,
        *,
        window_s: float = WINDOW_S,
        first_delay_s: float = 0.25,
        max_delay_s: float = 15.0,
    ) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._granted: deque[float] = deque()

    def grant(self, now: float) -> float | None:
        """Seconds to wait before the restart asked for at `now` (monotonic); None when the budget is used up."""
        while self._granted and now - self._granted[0] >= self._window_s:
            self._granted.popleft()
        if len(self._granted) >= self._max_restarts:
            return None
        delay = self._first_delay_s * 2.0 ** len(self._granted)
        self._granted.append(now)
        return min(delay, self._max_delay_s)
