"""Confidence intervals of means over prompts.

The unit is the prompt: responses to one prompt are not independent, and prompts are. So each prompt gives one value,
and the interval says how the mean would vary with other prompts of the same kind. It is the percentile bootstrap (Efron
and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13): means of prompts drawn with putting back. For the
difference of two models each prompt gives the difference of its two values, which is less noisy than two means apart.

Invariant: the same values give the same interval, whatever their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
_RESAMPLES = 2000
_SEED = 0


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
    # Drawing how often each distinct value comes is the same as drawing prompts, and costs less: most values are
    # fractions of a few responses.
    distinct, times = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    count = int(times.sum())
    mean = float(distinct @ times) / count
    if len(distinct) < 2:
        return Estimate(mean, count)
    drawn = np.random.default_rng(_SEED).multinomial(count, times / count, size=_RESAMPLES)
    low, high = np.quantile(drawn @ distinct / count, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, count, float(low), float(high))
