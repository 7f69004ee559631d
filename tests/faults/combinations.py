"""A small set of settings in which every two values of different settings meet.

Greedy, and the same each time: each next combination is the one that holds the most pairs which none has held yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Combination = dict[str, Any]


def covering(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Combination], bool]) -> list[Combination]:
    """Combinations that hold every pair of values which an allowed one can hold.

    Args:
        axes: setting -> its values.
        allowed: whether a combination can be run.
    """
    candidates = [one for values in product(*axes.values()) if allowed(one := dict(zip(axes, values, strict=True)))]
    missing = {pair for one in candidates for pair in _pairs(one)}
    chosen: list[Combination] = []
    while missing:
        best = max(candidates, key=lambda one: len(missing & _pairs(one)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(one: Combination) -> set[tuple[tuple[str, Any], ...]]:
    return set(combinations(one.items(), 2))
