"""Groups that are trained more than once: which uses count, what they demand of the gate, and how a draw is weighted.

A group may be claimed up to R times, at most once per version, each time under a lease of its own. Its uses are the
train versions of its claims on the surviving lineage. While it may be used again it is ready like any other; after its
last use it is consumed, and a group that has been used ends as trained, whatever ends it.

Rate: every unclaimed group demands `samples_per_insert` uses less those it has had. With R = 1 the demand is the number
of unclaimed groups, and the gate is the plain one.

Weighted draws: each ready group has a key `race + Exp(weight)`, where `race` is the highest key drawn so far. Taking
the lowest keys first is drawing without replacement in proportion to the weights (Efraimidis and Spirakis, 2006, in
its exponential form), and since the exponential distribution has no memory, newcomers may enter at `race` at any time.
So a draw costs O(log n), however large the table.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

# Weights are integers in this unit, so that their sum is exact.
WEIGHT_UNIT = 1_000_000
# The largest weight: sums over 90,000 ready groups that all have it stay below 2**53.
MAX_WEIGHT = 100_000 * WEIGHT_UNIT
_DIGITS = 13


def kept_uses(uses: Sequence[int], resumed_at: int) -> list[int]:
    """The uses that a learner resuming at a version finds in its weights."""
    return [version for version in uses if version < resumed_at]


def may_be_used_again(uses: Sequence[int], deadline: int, max_reuse: int) -> bool:
    """Whether a group just claimed can train at a later version, too."""
    return len(uses) < max_reuse and deadline > uses[-1]


def spent(uses: Sequence[int], samples_per_insert: int) -> int:
    """Uses that an unclaimed group does not demand any more."""
    return min(len(uses), samples_per_insert)


def weight_of(priority: float, exponent: float) -> int:
    """Weight of a group in a draw, in `WEIGHT_UNIT`s: priority ** exponent."""
    power = min(exponent * math.log(priority), math.log(MAX_WEIGHT / WEIGHT_UNIT))
    return max(1, round(math.exp(power) * WEIGHT_UNIT))


def draw_key(group_id: str, draws: int, seed: int, weight: int, race: float) -> float:
    """A group's key in the race, reproducible from its id, the number of its entries and the run's seed."""
    digest = hashlib.sha1(f"{group_id}:{draws}:{seed}".encode(), usedforsecurity=False).hexdigest()
    uniform = (int(digest[:_DIGITS], 16) + 0.5) / 16.0**_DIGITS
    return race - math.log(uniform) / weight * WEIGHT_UNIT
