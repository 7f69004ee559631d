"""Confidence intervals of means over prompts.

The unit is the prompt: responses to one prompt are not independent, and prompts are. So each prompt gives one value,
and the interval says how the mean would vary with other prompts of the same kind. It is the percentile bootstrap (Efron
and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13): means of prompts drawn with putting back. For the
difference of two models each prompt gives the difference of its two values, which is less noisy than two means apart.
The mean of many different values is nearly normal, and they have the normal interval.

Invariants: the same values give the same interval, whatever their order. An interval takes less than a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
_RESAMPLES = 2000
_SEED = 0
# Up to so many distinct values it is cheaper to draw how often each of them comes than to draw each prompt.
_COUNTED = 100
# More prompts than this, with more distinct values, have the normal interval.
_DRAWN = 10_000
# Draws that memory holds at a time.
_BLOCK = 1 << 20
_NORMAL_END = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts.

    Attributes:
        value: the mean.
        prompts: that have a value.
        low, high: ends of the interval; None where it is not known: of one prompt, and of values that are all equal.
    """

    value: float
    prompts: int
    low: float | None = None
    high: float | None = None


def estimate_mean(values: Sequence[float]) -> Estimate:
    """The mean of prompts' values with its confidence interval.

    Args:
        values: one for each prompt, at least one.
    """
    distinct, times = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    count = int(times.sum())
    mean = float(distinct @ times) / count
    if len(distinct) < 2:
        return Estimate(mean, count)
    if len(distinct) > _COUNTED and count > _DRAWN:
        half = _NORMAL_END * math.sqrt(float((distinct - mean) ** 2 @ times)) / count
        return Estimate(mean, count, mean - half, mean + half)
    means = _drawn_means(distinct, times)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, count, float(low), float(high))


def _drawn_means(distinct: NDArray[np.float64], times: NDArray[np.int64]) -> NDArray[np.float64]:
    """Means of as many prompts as there are, drawn with putting back: float64 [resamples]."""
    draws, count = np.random.default_rng(_SEED), int(times.sum())
    if len(distinct) <= _COUNTED:
        # Most values are fractions of a few responses.
        return draws.multinomial(count, times / count, size=_RESAMPLES) @ distinct / count
    values = np.repeat(distinct, times)
    rows = max(1, _BLOCK // count)
    sizes = (min(rows, _RESAMPLES - done) for done in range(0, _RESAMPLES, rows))
    return np.concatenate([values[draws.integers(count, size=(size, count))].mean(axis=1) for size in sizes])
