"""Decides if busy workers compute or wait for something: only then do more workers score more in the same time."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

# Share of a processor below which a busy worker waits for something.
_COMPUTES = 0.25
_LEAST_S = 0.4


class CpuEffort:
    """Compares the processor times of the same workers between calls."""

    def __init__(self) -> None:
        self._before: tuple[float, Mapping[int, float]] = (0.0, {})

    def is_waiting(self, seconds: Mapping[int, float], now: float | None = None) -> bool:
        """True if the workers have hardly computed since the last call.

        Args:
            seconds: processor time by worker; False for another set of workers than in the last call.
            now: monotonic time.
        """
        now = time.monotonic() if now is None else now
        (at, before), self._before = self._before, (now, dict(seconds))
        if not seconds or before.keys() != seconds.keys() or now - at < _LEAST_S:
            return False
        return sum(seconds.values()) - sum(before.values()) < _COMPUTES * (now - at) * len(seconds)


def processor_seconds(pid: int) -> float | None:
    """Processor time of a process and of children that have ended; None where it has ended itself."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.Error:
        return None
