"""The latest values of several quantities, and their percentiles at a cost that does not grow with a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class RecentTimes:
    """The latest times of quantities that are always measured together.

    Args:
        quantities: Q, their number.
        kept: K, values of each that are kept.
    """

    def __init__(self, quantities: int, kept: int) -> None:
        # [Q, K], microseconds; the oldest value is overwritten.
        self._values = np.zeros((quantities, kept), np.int64)
        self._count = 0

    def add(self, times: Sequence[int]) -> None:
        """Adds one time of each quantity, in microseconds."""
        self._values[:, self._count % self._values.shape[1]] = times
        self._count += 1

    def percentiles(self) -> list[tuple[float, float]]:
        """p50 and p99 of each quantity, in microseconds; 0 without any value."""
        known = self._values[:, : self._count]
        if not self._count:
            return [(0.0, 0.0)] * len(known)
        p50, p99 = np.percentile(known, (50, 99), axis=1)
        return list(zip(p50.tolist(), p99.tolist(), strict=True))
