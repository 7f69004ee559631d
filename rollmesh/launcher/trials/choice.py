"""The decisions of trials: which placement is tried next, and which one stays. Pure.

Invariants: each placement is tried at most once. The one that stays was measured, and no measured one is faster by more
than `TIE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rollmesh.launcher.trials.estimates import Bounds

TIE = 0.03
"""Share of a batch's time within which placements count as equal: the one in force stays then."""


def next_trial(
    estimates: Mapping[str, Bounds], measured: Mapping[str, float], *, cost_s: float, batches_left: int
) -> str | None:
    """The placement to try next, the one that may be fastest; None where no other one may be faster.

    Args:
        estimates: bounds of the seconds per batch by placement.
        measured: seconds per batch of those that were tried; infinite where one has failed.
        cost_s: seconds of a change of the placement.
        batches_left: until the end of the run.
    """
    # The change pays off before the run ends, if the placement is as fast as it may be at best.
    found = may_be_faster(estimates, measured, by_s=cost_s / max(1, batches_left))
    return found[0] if found else None


def may_be_faster(estimates: Mapping[str, Bounds], measured: Mapping[str, float], *, by_s: float = 0.0) -> list[str]:
    """The placements that were not tried and may be faster than the best one so far, the most promising first.

    Args:
        estimates, measured: as `next_trial` has them.
        by_s: seconds per batch by which they have to be faster, in addition to `TIE`.
    """
    best = min(measured.values())
    found = {
        name: bounds
        for name, bounds in estimates.items()
        if name not in measured and bounds.low < best * (1 - TIE) - by_s
    }
    # Best first: only a trial of the smallest bound, which all others stay above, can end the search.
    return sorted(found, key=lambda name: (found[name].low, found[name].high, name))


def best_placement(present: str, measured: Mapping[str, float]) -> str:
    """The placement that stays.

    Args:
        present: in force.
        measured: seconds per batch by placement.
    """
    fastest = min(measured, key=lambda name: (measured[name], name))
    return present if measured.get(present, math.inf) <= measured[fastest] * (1 + TIE) else fastest
