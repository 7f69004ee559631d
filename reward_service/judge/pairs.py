"""Comparisons by twos within a group: which there are, and the rewards from their values. Pure.

Each pair is compared in both orders, since judges favour a place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Pair = tuple[int, int]


def schedule(count: int, opponents: int | None) -> list[Pair]:
    """Pairs of places, each once: all of them, or those of neighbours on a ring.

    Args:
        count: of responses.
        opponents: of each response, an odd number rounded up; None: all others.
    """
    near = count if opponents is None else -(-opponents // 2)
    if 2 * near >= count - 1:
        return [(first, second) for first in range(count) for second in range(first + 1, count)]
    ring = {(place, (place + step) % count) for place in range(count) for step in range(1, near + 1)}
    return sorted((min(pair), max(pair)) for pair in ring)


def rewards(count: int, values: Mapping[Pair, tuple[float, float]]) -> list[tuple[float, float]]:
    """Per response the share of comparisons that it has won, and the share of pairs on which both orders agree.

    Args:
        count: of responses, each in at least one pair.
        values: by pair, for its first response: 1 won, 0 lost, in either order.
    """
    won: list[list[float]] = [[] for _ in range(count)]
    agreed: list[list[float]] = [[] for _ in range(count)]
    for (first, second), orders in values.items():
        value = (orders[0] + orders[1]) / 2
        agreement = float((orders[0] > 0.5) == (orders[1] > 0.5) and (orders[0] < 0.5) == (orders[1] < 0.5))
        won[first].append(value)
        won[second].append(1.0 - value)
        agreed[first].append(agreement)
        agreed[second].append(agreement)
    return [(_mean(shares), _mean(agreements)) for shares, agreements in zip(won, agreed, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
