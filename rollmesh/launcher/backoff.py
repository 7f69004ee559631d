"""Restart budgets of services that died.

Invariants: within any window of `window_s` seconds at most `max_restarts` restarts are granted. A service that hangs
draws on a budget of its own. A hang is found only after minutes, so a short window would grant restarts for ever. Pure:
the clock is an argument.
"""

from __future__ import annotations

from collections import deque

from rollmesh.report.restarts import Reason

WINDOW_S = 600.0
HUNG_WINDOW_S = 86_400.0


class Restarts:
    """Restarts of one service.

    Args:
        max_restarts: granted within ten minutes after ends, and within a day after hangs.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._ended = RestartBudget(max_restarts)
        self._hung = RestartBudget(max_restarts, window_s=HUNG_WINDOW_S)

    def grant(self, now: float, reason: Reason) -> float | None:
        """Seconds to wait before the restart; None when the budget for this reason is used up."""
        return (self._ended if reason == "exit" else self._hung).grant(now)

    def used_up(self, reason: Reason) -> str:
        """A sentence about the used-up budget."""
        did, window = ("died", "ten minutes") if reason == "exit" else ("hung", "a day")
        return f"{did} more than {self._max_restarts} times within {window}"


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
