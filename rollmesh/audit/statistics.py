"""Robust statistics of an audit: ranks, jumps, and enrichment within steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MAD = 1.4826


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's, with mean ranks of ties; None where one of them does not vary."""
    if len(first) < 3:
        return None
    one, other = _ranks(first), _ranks(second)
    if not one.std() or not other.std():
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, places, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_ranks: NDArray[np.float64] = ((ends - counts) + ends - 1) / 2
    return mean_ranks[places]


@dataclass(frozen=True, slots=True)
class Jump:
    """A place where the level of a series changes at once.

    Attributes:
        index: of the first value of the new level.
        before, after: medians.
        noises: the change, in units of the usual change from value to value.
    """

    index: int
    before: float
    after: float
    noises: float


def largest_jump(values: Sequence[float], *, window: int, noises: float, share: float) -> Jump | None:
    """The largest jump of a series; None without one.

    A jump is sharp: most of the change between two windows happens within a fifth of them. So a slow rise is none.

    Args:
        values: in the order of time.
        window: values before and after it.
        noises: least change in units of the noise.
        share: least change as a share of the whole range of the series.
    """
    series = np.asarray(values, float)
    if len(series) < 3 * window:
        return None
    spread = float(np.ptp(series))
    noise = max(_MAD * float(np.median(np.abs(np.diff(series)))) / math.sqrt(2), 1e-3 * spread)
    if not spread:
        return None
    near = max(1, window // 5)
    found: list[tuple[float, Jump]] = []
    for index in range(window, len(series) - window + 1):
        left, right = series[index - window : index], series[index : index + window]
        before, after = float(np.median(left)), float(np.median(right))
        change = abs(after - before)
        if change < noises * noise or change < share * spread:
            continue
        # Right before and after the place, the levels are those of the windows; within each window there is one level.
        sharp = _distance(left[-near:], right[:near])
        drift = max(_distance(side[: window // 2], side[window // 2 :]) for side in (left, right))
        if sharp >= 0.7 * change and drift <= 0.25 * change:
            found.append((sharp, Jump(index, before, after, change / noise)))
    return max(found, key=lambda one: one[0])[1] if found else None


def _distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return abs(float(np.median(one)) - float(np.median(other)))


@dataclass(slots=True)
class Enrichment:
    """The excess of something in one class over another, compared within each step (Mantel-Haenszel)."""

    observed: float = 0.0
    expected: float = 0.0
    variance: float = 0.0

    def add(self, high_with: int, high: int, low_with: int, low: int) -> None:
        """Counts one step.

        Args:
            high_with, high: of the first class those that have it, and all.
            low_with, low: of the second class.
        """
        total, with_it = high + low, high_with + low_with
        if not high or not low or total < 2:
            return
        self.observed += high_with
        self.expected += high * with_it / total
        self.variance += high * low * with_it * (total - with_it) / (total * total * (total - 1))

    @property
    def z(self) -> float:
        """Standard deviations above what chance gives."""
        return (self.observed - self.expected) / math.sqrt(self.variance) if self.variance > 0 else 0.0


def concordance(pairs: Iterable[tuple[float, float]]) -> tuple[int, int]:
    """Pairs of differences that have the same sign, and all in which neither is 0."""
    agreeing = counted = 0
    for one, other in pairs:
        if one and other:
            counted += 1
            agreeing += (one > 0) == (other > 0)
    return agreeing, counted
