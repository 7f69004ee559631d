"""Weights of groups in weighted draws.

Each ready group has a key `race + Exp(weight)`, where `race` is the highest key drawn so far. Taking the lowest keys
first is drawing without replacement in proportion to the weights (Efraimidis and Spirakis, 2006, in its exponential
form). The exponential distribution has no memory, so newcomers may enter at `race` at any time. So a draw costs
O(log n), however large the table. The keys are made in `buffer/lua/lib/transitions.lua`.
"""

from __future__ import annotations

import math

# Weights are integers in this unit, so that their sum is exact.
WEIGHT_UNIT = 1_000_000
# The largest weight: sums over 90,000 ready groups that all have it stay below 2**53.
MAX_WEIGHT = 100_000 * WEIGHT_UNIT


def weight_of(priority: float, exponent: float) -> int:
    """Weight of a group in a draw, in `WEIGHT_UNIT`s: priority ** exponent."""
    power = min(exponent * math.log(priority), math.log(MAX_WEIGHT / WEIGHT_UNIT))
    return max(1, round(math.exp(power) * WEIGHT_UNIT))
