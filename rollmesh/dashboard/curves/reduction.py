"""Long curves reduced to what a plot can show, and as short JSON.

Invariant: a point of a reduced curve is the mean of successive values. Their smallest and largest stand with it, so
that no outlier is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rollmesh.dashboard.curves.columns import Column

MOST_POINTS = 600
"""Points of a curve; a chart is about as many pixels wide."""
_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Buckets:
    """Successive rows that become one point each.

    Attributes:
        rows: in all.
        size: rows of a bucket; the last one may have fewer.
    """

    rows: int
    size: int

    @classmethod
    def of(cls, rows: int, most: int = MOST_POINTS) -> Buckets:
        """The smallest buckets that give at most so many points."""
        return cls(rows, max(1, -(-rows // most)))

    def last_of(self, column: Column) -> Column:
        """The last value of each bucket, for axes."""
        ends = np.minimum(np.arange(self.size, self.rows + self.size, self.size), self.rows)
        return column[ends - 1] if self.rows else column

    def mean_of(self, column: Column) -> Column:
        """The mean of each bucket, NaN left out; NaN where a bucket has no value."""
        if self.size == 1 or not self.rows:
            return column
        known = ~np.isnan(column)
        counts = np.add.reduceat(known.astype(np.float64), self._starts())
        sums = np.add.reduceat(np.where(known, column, 0.0), self._starts())
        with np.errstate(invalid="ignore"):
            mean: Column = sums / np.where(counts > 0, counts, np.nan)
        return mean

    def range_of(self, column: Column) -> tuple[Column, Column]:
        """The smallest and the largest value of each bucket; NaN where it has none."""
        if self.size == 1 or not self.rows:
            return column, column
        return np.fmin.reduceat(column, self._starts()), np.fmax.reduceat(column, self._starts())

    def _starts(self) -> np.ndarray:
        return np.arange(0, self.rows, self.size)


def rounded(values: Iterable[float], digits: int = _DIGITS) -> list[float | int | None]:
    """Numbers as JSON has them, with so many significant digits; NaN and infinities are null."""
    return [_short(value, digits) for value in values]


def _short(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short
