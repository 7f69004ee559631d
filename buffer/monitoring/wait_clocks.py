"""Wait clocks: cumulative waiting times and present reasons, per table and front, added up in Redis.

Invariant: a wait is counted while it lasts, not only at its end, so that the metrics of a run that hangs show where.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

INSERTS = "inserts"  # the learner waits for groups
SAMPLES = "samples"  # generators wait at the gate, and decode nothing of the table


@dataclass(slots=True)
class _Wait:
    since: float
    reason: str


class WaitClocks:
    """Clocks of one front and table.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[tuple[str, str], _Wait] = {}
        self._total = {INSERTS: 0.0, SAMPLES: 0.0}

    def begin(self, kind: str, who: str, reason: str) -> None:
        """Begins or continues a wait of `who`, for this reason."""
        wait = self._open.get((kind, who))
        if wait is None:
            self._open[(kind, who)] = _Wait(self._clock(), reason)
        else:
            wait.reason = reason

    def end(self, kind: str, who: str) -> None:
        """Ends the wait of `who`."""
        wait = self._open.pop((kind, who), None)
        if wait is not None:
            self._total[kind] += self._clock() - wait.since

    def waiting(self, kind: str) -> int:
        """Number of those that wait at present."""
        return sum(k == kind for k, _ in self._open)

    def reason(self, kind: str) -> str:
        """The reason of the longest present wait; empty without any wait."""
        waits = [wait for (k, _), wait in self._open.items() if k == kind]
        return min(waits, key=lambda wait: wait.since).reason if waits else ""

    def drain_ms(self, kind: str) -> int:
        """Whole milliseconds waited since the last call; waits still open count up to now."""
        now = self._clock()
        for (k, _), wait in self._open.items():
            if k == kind:
                self._total[kind] += now - wait.since
                wait.since = now
        whole = int(self._total[kind] * 1000)
        self._total[kind] -= whole / 1000
        return whole
